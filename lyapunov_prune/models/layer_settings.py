"""How a text config describes single layers, and how that changes when layers are removed.

Four forms cover nearly all families; what only one family does is in `families.py`:

- a list with one entry per layer (`layer_types`, `no_rope_layers`, …). If the class has a default for it, that default
  must have the default number of layers too: a list of two limits is as long as a two-layer model only by chance;
- a list of layer indices (`mlp_only_layers`, `attn_layer_indices`, …);
- the number of first or last layers of a kind (`first_k_dense_replace`, `num_kv_shared_layers`, …);
- transformers' `per_layer_config`, overrides by layer index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lyapunov_prune.models.settings import unknown_layer_numbers

# Lists of layer indices, by name: no rule can tell the indices `[0, 1]` from two flags.
INDEX_LISTS = (
    "attn_layer_indices",
    "cross_attention_layers",
    "full_attn_idxs",
    "hybrid_layer_ids",
    "local_layer_ids",
    "mlp_only_layers",
    "moe_layers",
)
# Numbers of layers at the start, or at the end, that are of another kind.
FIRST_LAYERS = ("first_k_dense_replace", "max_window_layers", "moe_layer_start_index", "num_dense_layers")
LAST_LAYERS = ("num_kv_shared_layers",)
# Kinds of layers without keys and values, as named by transformers' caches.
NO_KEYS = frozenset({"linear_attention", "mamba", "conv", "moe", "mlp"})


def lost_attention(before: Any, after: Any) -> str | None:
    """Why a hybrid model without attention is wrong: its cache counts positions by the keys; None if it has any."""
    had, has = (set(getattr(c, "layer_types", None) or ()) - NO_KEYS for c in (before, after))
    if has or not had:
        return None
    layers = ", ".join(str(i) for i, kind in enumerate(before.layer_types) if kind not in NO_KEYS)
    return f"no attention is left, and transformers' cache counts positions by its keys; keep one of layers {layers}"


def slice_settings(config: Any, count: str, kept: tuple[int, ...], total: int) -> list[str]:
    """Make `config` describe the layers `kept` of `total`, in place; `count` names its number of layers.

    Returns the deleted settings: those with layer numbers of unknown meaning (`unknown_layer_numbers`).
    """
    overrides, others = _overrides(config), _other_lists(type(config), count)
    gone = [name for name in unknown_layer_numbers(config, total) if name not in INDEX_LISTS]
    for name in gone:
        delattr(config, name)
    fields = vars(config)
    if config.is_encoder_decoder and "decoder" in count:  # one config for both stacks has lists for the encoder alone
        others = frozenset(fields)
    if (fields.get("decoder_sparse_step") or 1) != 1:
        # A step cannot describe the kept layers; the list of exceptions beside it can.
        step, dense = fields["decoder_sparse_step"], fields.get("mlp_only_layers") or []
        config.mlp_only_layers = [i for i in range(total) if i in dense or (i + 1) % step]
        config.decoder_sparse_step = 1
    for name, value in list(fields.items()):
        if name in INDEX_LISTS and isinstance(value, list | tuple):
            setattr(config, name, type(value)(kept.index(i) for i in value if i in kept))
        elif isinstance(value, list | tuple) and len(value) == total and "token" not in name and name not in others:
            setattr(config, name, type(value)(value[i] for i in kept))
        elif name in FIRST_LAYERS and isinstance(value, int):
            setattr(config, name, sum(i < value for i in kept))
        elif name in LAST_LAYERS and isinstance(value, int):
            setattr(config, name, sum(i >= total - value for i in kept))
    # The decoder of an encoder-decoder sizes its caches by `num_hidden_layers`, which counts the missing encoder's
    # layers.
    for name in {count} if config.is_encoder_decoder else {count, "num_hidden_layers"}:
        # ProphetNet computes this from the encoder's number.
        elsewhere = name != count and isinstance(getattr(type(config), name, None), property)
        if getattr(config, name, None) == total and not elsewhere:
            setattr(config, name, len(kept))
    if overrides is not None:
        config.per_layer_config = {new: overrides[old] for new, old in enumerate(kept) if old in overrides}
    return gone


def _other_lists(kind: Callable[[], Any], count: str) -> frozenset[str]:
    """Lists whose default length differs from the default number of layers of the config's class."""
    try:
        default = kind()
    except Exception:  # the class has no complete defaults
        return frozenset()
    lists = {name: value for name, value in vars(default).items() if isinstance(value, list | tuple) and value}
    return frozenset(name for name, value in lists.items() if len(value) != getattr(default, count, None))


def _overrides(config: Any) -> dict[int, dict[str, Any]] | None:
    """transformers' overrides of single layers, by index; None if the config has none."""
    if not getattr(config, "is_heterogeneous", False):
        return None
    written = config.to_dict()["per_layer_config"]
    return {int(index): values for index, values in written.items()}
