"""What a GGUF header says about single layers, and the header without some of them.

Under the architecture's name, an array with one item per layer describes layers. What llama.cpp derives from a layer's
number is in no array: `_ENGINE` lists how it does that for each architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.models.gguf_header import Header, Value, number

# Arrays under the architecture's name that do not describe layers.
_OTHER_ARRAYS = ("rope.dimension_sections", "classifier.output_labels")
# Numbers from which llama.cpp derives the kinds of layers by position.
_BY_PLACE = (
    *("leading_dense_block_count", "moe_every_n_layers", "nextn_predict_layers", "n_deepstack_layers"),
    *("interleave_moe_layer_step", "full_attention_interval", "attention.shared_kv_layers", "rescale_every_n_layers"),
)
_PATTERN = "attention.sliding_window_pattern"


@dataclass(frozen=True)
class _Engine:
    """How llama.cpp tells the layers of an architecture apart.

    Every `period`-th layer attends to all tokens and the others to a window, unless `attention.sliding_window_pattern`
    gives another period; None: no layer differs. A model with `scaled` layers uses another attention scale.
    """

    period: int | None = None
    scaled: int | None = None


_ENGINE: Mapping[str, _Engine] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma", "phi3"), _Engine()),
    **dict.fromkeys(("gpt2", "bloom", "falcon", "starcoder2", "stablelm", "nemotron", "mamba"), _Engine()),
    **dict.fromkeys(("lfm2", "deci"), _Engine()),
    "gemma2": _Engine(2, scaled=46),
    "gemma3": _Engine(6, scaled=62),
    "gpt-oss": _Engine(2),
}


def full_attention(header: Header) -> tuple[bool, ...] | None:
    """For each layer, whether it attends to all tokens rather than a window; None if layers do not differ.

    Raises LyapunovPruneError if the array's length is not the number of layers.
    """
    name, engine = header.architecture, _ENGINE.get(header.architecture)
    told = header.read(f"{name}.{_PATTERN}")
    if isinstance(told, list):
        _require_lengths(header)
        return tuple(not windowed for windowed in told)
    known = None if engine is None else engine.period
    period = known if told is None else int(told)
    return None if period is None else _repeated(period, header.layers)


def wrong_arrays(header: Header) -> dict[str, int]:
    """Arrays under the architecture's name whose length is not the number of layers, with their lengths.

    Arrays that are known to describe something else are left out.
    """
    inside = f"{header.architecture}."
    return {
        key: value.length
        for key, value in header.values.items()
        if key.startswith(inside)
        and key.removeprefix(inside) not in _OTHER_ARRAYS
        and value.length is not None
        and value.length != header.layers
    }


def values_without(header: Header, kept: tuple[int, ...]) -> dict[str, Value]:
    """The values of `header` for a file with only the layers `kept`.

    Raises LyapunovPruneError if llama.cpp's header cannot express which layers are left.
    """
    name, layers = header.architecture, header.layers
    engine = _ENGINE.get(name)
    scaled = scaled_depth(name)
    wrong = {
        f"it is not known here how llama.cpp distinguishes the layers of {name}": engine is None,
        f"llama.cpp scales the attention of {name} by its number of layers, {scaled} or not": (
            scaled is not None and (layers == scaled) != (len(kept) == scaled)
        ),
        **{f"{name}.{key} names layers by number": header.read(f"{name}.{key}") for key in _BY_PLACE},
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"{why}; write a folder instead")
    _require_lengths(header)
    values = {}
    for key, value in header.values.items():
        own = key.removeprefix(f"{name}.")
        whole = key == own or value.length is None or own in _OTHER_ARRAYS
        values[key] = value if whole else value.picked(kept)
    values[f"{name}.block_count"] = number(len(kept))
    told, full = header.read(f"{name}.{_PATTERN}"), full_attention(header)
    if full is not None and not isinstance(told, list):
        period = period_values(name, tuple(full[layer] for layer in kept), told)
        values |= {f"{name}.{key}": value for key, value in period.items()}
    return values


def scaled_depth(architecture: str) -> int | None:
    """The number of layers at which llama.cpp scales the attention of `architecture` by the width of the model."""
    engine = _ENGINE.get(architecture)
    return None if engine is None else engine.scaled


def period_values(architecture: str, full: tuple[bool, ...], told: Any = None) -> dict[str, Value]:
    """The key with the period of layers with full attention (`full`); empty if `told` or the default fits.

    `told` is the period in the header, or None. The key is relative to the architecture's name. Raises
    LyapunovPruneError if no period fits.
    """
    now = _ENGINE[architecture].period if told is None else told
    assert now is not None
    for period in (now, *range(len(full) + 1)):
        if _repeated(period, len(full)) == full:
            return {} if period == now else {_PATTERN: number(period)}
    raise LyapunovPruneError(
        f"llama.cpp reads the windows of {architecture} as one period, which the remaining layers do not have; remove "
        "whole periods, or --layers at equal distances"
    )


def _repeated(period: int, layers: int) -> tuple[bool, ...]:
    """Whether each layer is the last of its period; period 0 means no layer, as in llama.cpp."""
    return tuple(period > 0 and layer % period == period - 1 for layer in range(layers))


def _require_lengths(header: Header) -> None:
    for key, length in wrong_arrays(header).items():
        raise LyapunovPruneError(
            f"{key} in {header.path} holds {length} values for {header.layers} layers, so it is unclear which to "
            "remove; convert the original checkpoint again"
        )
