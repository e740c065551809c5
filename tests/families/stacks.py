"""Encoder-decoders: what each of their stacks loses, tried on tiny random models and proven by the gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from families.features import NONE, YES, as_of_a_class
from helpers import SMALL, with_large_weights
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.encoders import Stack
from lyapunov_prune.pruning.plan import PruningPlan

LAYERS = 4  # of both stacks, so that a count of the wrong one would not be seen by its value alone
START = 3
_BART: dict[str, Any] = {
    **{
        f"{stack}_{what}": n
        for stack in ("encoder", "decoder")
        for what, n in (("ffn_dim", 48), ("attention_heads", 4))
    },
    "d_model": 32,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
}
_T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": LAYERS, "num_decoder_layers": LAYERS}
_FLAT = {**{k: SMALL[k] for k in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bart", "blenderbot", "marian", "mbart", "mvp", "pegasus", "plbart"), _BART),
    "led": {**_BART, "attention_window": 8},
    "m2m_100": {**_BART, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    **dict.fromkeys(("longt5", "mt5", "t5", "umt5"), _T5),
    "switch_transformers": {**_T5, "num_experts": 4},
}
STACKS: tuple[Stack, ...] = ("encoder", "decoder")


def make(family: str = "t5", **changes: Any) -> PreTrainedModel:
    """A random encoder-decoder, float32, with weights large enough for every layer to matter."""
    kind = CONFIG_MAPPING[family]
    torch.manual_seed(0)
    config = kind(**{**_FLAT, **SETTINGS[family], **changes})
    config.decoder_start_token_id = START
    model = with_large_weights(AutoModelForSeq2SeqLM.from_config(config).eval())
    for module in model.modules():
        if type(module).__name__ == "MarianSinusoidalPositionalEmbedding":  # which no checkpoint holds
            module.weight.data.copy_(module.create_weight())
    return model


def _ids() -> torch.Tensor:
    return torch.randint(3, SMALL["vocab_size"], (3, 24), generator=torch.Generator().manual_seed(1))


def _loses(handle: Decoder, plan: PruningPlan) -> bool:
    return lp.verify_removal(handle, lp.remove_layers(handle, plan), plan, _ids()).passed


def _part(what: str, criterion: str) -> Callable[[Decoder], bool]:
    """The part of one layer, or an expert of every layer, leaves by a ranking."""
    return lambda handle: _loses(handle, lp.rank(handle, _ids(), what=what, criterion=criterion).plan(1))


def _measured(handle: Decoder) -> bool:
    rho = lp.measure_contraction(handle, _ids(), seeds=(0,)).rho
    influence = lp.block_influence(handle, _ids()).influence
    layers = handle.structure.num_layers
    return bool(len(rho) == len(influence) == layers and (np.isfinite(rho) & (rho > 0) & (influence >= 0)).all())


TRIED: dict[str, Callable[[Decoder], bool]] = {
    "one (2)": lambda handle: _loses(handle, PruningPlan.given(handle, [2])),
    "two (1, 3)": lambda handle: _loses(handle, PruningPlan.given(handle, [1, 3])),
    "layer 0": lambda handle: _loses(handle, PruningPlan.given(handle, [0])),
    "measured": _measured,
    "attention": _part("attention", "bi"),
    "mlp": _part("mlp", "bi"),
    "experts": _part("experts", "frequency"),
}


def judge_stack(family: str, stack: Stack) -> dict[str, str]:
    """Each of `TRIED` on one stack: "yes", "-" where there is nothing of the kind, or why not."""
    tried = {label: each for label, each in TRIED.items() if label != "experts" or "num_experts" in SETTINGS[family]}
    deeper = {"num_layers": LAYERS + 2} if stack == "encoder" and "num_layers" in SETTINGS[family] else {}
    found = {label: _verdict(each, wrap(make(family, **deeper), stack=stack)) for label, each in tried.items()}
    return dict.fromkeys(TRIED, NONE) | found


def _verdict(tried: Callable[[Decoder], bool], handle: Decoder) -> str:
    try:
        return YES if tried(handle) else "WRONG: the check does not hold"
    except LyapunovPruneError as error:
        return as_of_a_class(error, handle.model)
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}"[:200]
