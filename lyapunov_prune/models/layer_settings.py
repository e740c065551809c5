"""How a text config speaks of single layers, and how that follows when layers leave.

Four forms cover nearly all families; what only one family does stands in `families.py`:

- a list with an entry a layer (`layer_types`, `no_rope_layers`, …), as long as there are layers in the defaults of its
  class too, where these have it: one of two limits or multipliers is as long as a model of two layers by chance;
- a list of layer indices (`mlp_only_layers`, `attn_layer_indices`, …);
- how many of the first or last layers are of a kind (`first_k_dense_replace`, `num_kv_shared_layers`, …);
- transformers' own `per_layer_config`, overrides by layer index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.settings import unknown_layer_numbers

# Lists of layer indices. No rule tells `[0, 1]` of eight layers from flags of two, so they are named.
INDEX_LISTS = (
    "attn_layer_indices",
    "cross_attention_layers",
    "full_attn_idxs",
    "hybrid_layer_ids",
    "local_layer_ids",
    "mlp_only_layers",
    "moe_layers",
)
# The number of layers at the start, or at the end, that are of another kind.
FIRST_LAYERS = ("first_k_dense_replace", "max_window_layers", "moe_layer_start_index", "num_dense_layers")
LAST_LAYERS = ("num_kv_shared_layers",)
# Kinds of layers without keys and values, as transformers' caches call them.
NO_KEYS = frozenset({"linear_attention", "mamba", "conv", "moe", "mlp"})


def require_attention(before: Any, after: Any) -> None:
    """Raise LyapunovPruneError when a hybrid has no attention left: its cache counts positions by the keys."""
    had, has = (set(getattr(c, "layer_types", None) or ()) - NO_KEYS for c in (before, after))
    if had and not has:
        kept = [i for i, kind in enumerate(before.layer_types) if kind not in NO_KEYS]
        raise LyapunovPruneError(
            "no layer with attention is left, and by its keys transformers' cache counts positions; "
            f"keep one of layers {', '.join(map(str, kept))}"
        )


def slice_settings(config: Any, count: str, kept: tuple[int, ...], total: int) -> list[str]:
    """Make `config` describe the layers `kept` of `total`, in place; `count` names its number of layers.

    Returns the settings with numbers of layers that nobody understands (`unknown_layer_numbers`): they are deleted.
    """
    gone = [name for name in unknown_layer_numbers(config, total) if name not in INDEX_LISTS]
    for name in gone:
        delattr(config, name)
    fields = vars(config)
    overrides, others = _overrides(config), _other_lists(type(config), count)
    if (fields.get("decoder_sparse_step") or 1) != 1:
        # A step cannot describe what is left; the list of exceptions beside it can.
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
    # An encoder-decoder's caches are sized by `num_hidden_layers`, which counts an encoder that is not there.
    for name in {count, "num_hidden_layers"}:
        # ProphetNet computes it from those of the encoder.
        elsewhere = name != count and isinstance(getattr(type(config), name, None), property)
        if getattr(config, name, None) == total and not elsewhere:
            setattr(config, name, len(kept))
    if overrides is not None:
        config.per_layer_config = {new: overrides[old] for new, old in enumerate(kept) if old in overrides}
    return gone


def _other_lists(kind: Callable[[], Any], count: str) -> frozenset[str]:
    """The lists of a class of configs that have another length in its defaults than these have layers."""
    try:
        default = kind()
    except Exception:  # a class that cannot be built from nothing says nothing
        return frozenset()
    lists = {name: value for name, value in vars(default).items() if isinstance(value, list | tuple) and value}
    return frozenset(name for name, value in lists.items() if len(value) != getattr(default, count, None))


def _overrides(config: Any) -> dict[int, dict[str, Any]] | None:
    """Transformers' overrides of single layers, by index; None for a config without."""
    if not getattr(config, "is_heterogeneous", False):
        return None
    written = config.to_dict()["per_layer_config"]
    return {int(index): values for index, values in written.items()}
