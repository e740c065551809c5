"""Llama models without some attentions in the format that engines know: `DeciLMForCausalLM` with `block_configs`.

vLLM (nemotron_nas.py) and llama.cpp (architecture deci) run it. Such a checkpoint is a compact one whose config.json
describes the layers twice: `block_configs` for engines, `cuts` for this package and the module beside the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lyapunov_prune.errors import first_of
from lyapunov_prune.models.compact import PREFIX

BLOCKS = "block_configs"  # a config that has it gets it rewritten on saving
_ARCHITECTURE = "DeciLMForCausalLM"
_FAMILIES = ("llama", "mistral")
_MULTIPLE = 256  # engines round widths derived from `ffn_mult` up to a multiple of this


def not_deci(config: Mapping[str, Any]) -> str | None:
    """Why engines cannot run a compact model with this config.json as DeciLM; None if they can."""
    family, cuts = str(config["model_type"]).removeprefix(PREFIX), config["cuts"]
    window = config.get("sliding_window")
    forms = {form for places in cuts for form in places.values()}
    wrong = {
        f"it is a {family}, and DeciLM are {' and '.join(_FAMILIES)}": family not in _FAMILIES,
        "it holds merged blocks or factors, which no engine knows": bool(forms - {"none", "identity"}),
        "layer 0 lacks its attention, which engines need": "none" in cuts[0].values(),
        "every layer has its attention": "none" not in forms,
        "it has a sliding window": window is not None and window < config["max_position_embeddings"],
        f"its activation is {config['hidden_act']}": config["hidden_act"] != "silu",
    }
    return first_of(wrong)


def as_served(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json, with `block_configs` (if it has them) recomputed from its `cuts`.

    They are dropped, and the config keeps its own class, if DeciLM can no longer express the model.
    """
    if BLOCKS not in config:
        return dict(config)
    rest = {key: value for key, value in config.items() if key != BLOCKS}
    if not_deci(rest):
        return rest
    return rest | {BLOCKS: [_block(rest, places) for places in rest["cuts"]], "architectures": [_ARCHITECTURE]}


def _block(config: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    gone = "none" in places.values()
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    width, hidden = config["intermediate_size"], config["hidden_size"]
    share = 1.5 * width / hidden
    told = -(-int(2 * share * hidden / 3) // _MULTIPLE) * _MULTIPLE  # the width that both engines compute
    ffn = {"ffn_mult": share} if told == width else {"intermediate_size": width}  # only vLLM reads intermediate_size
    attention = {"no_op": gone, "n_heads_in_group": None if gone else group, "replace_with_linear": False}
    return {"attention": attention, "ffn": {"no_op": False, "replace_with_linear": False, **ffn}}
