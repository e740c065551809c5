"""Checkpoints of packed integers (compressed-tensors): which of them are unpacked on loading, and with what."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import CompressedTensorsConfig, PreTrainedConfig
from transformers.quantizers import AutoHfQuantizer, HfQuantizer

from lyapunov_prune.errors import LyapunovPruneError

_PACKED, _SCALE = ".weight_packed", ".weight_scale"
DENSE = "weight"  # what transformers' rule of unpacking calls a weight that is not packed, and leaves alone
PACK = "pack-quantized"  # its name for integers of fewer bits that lie side by side in 32


def require_compressed_tensors() -> None:
    """Raise LyapunovPruneError unless the library that packs and unpacks is installed."""
    if importlib.util.find_spec("compressed_tensors") is None:
        raise LyapunovPruneError("packed weights need compressed-tensors; run: pip install 'lyapunov-prune[packed]'")


def is_unpacked(config: PreTrainedConfig) -> bool:
    """Whether `load` makes a dense model of a checkpoint with this config: integer weights, all packed alike.

    Others would be measured as what they are not: rounded activations left out, or one group unpacked as another.
    """
    packed = getattr(config, "quantization_config", None)
    if not isinstance(packed, dict) or packed.get("quant_method") != "compressed-tensors":
        return False
    groups = packed.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        return False
    more = [group.get(key) for key in ("input_activations", "output_activations")]
    more += [packed.get(key) for key in ("kv_cache_scheme", "transform_config", "sparsity_config")]
    format = group.get("format") or packed.get("format")
    weights = group["weights"]
    known = weights.get("type") == "int" and weights.get("strategy") in ("channel", "group")
    return format == PACK and known and not any(more)


def stays_packed(config: PreTrainedConfig) -> bool:
    """Whether the weights of a checkpoint with this config are of another method, which transformers runs packed."""
    packed = getattr(config, "quantization_config", None)
    return isinstance(packed, dict) and packed.get("quant_method") != "compressed-tensors"


def require_scales(files: Iterable[Path], config: PreTrainedConfig) -> None:
    """Raise ValueError for scales of another shape than their matrices need: torch would spread them over these.

    A matrix of m rows is packed in (m, ⌈n · bits / 32⌉), and has scales (m, 1), or (m, n / group size).
    """
    weights = next(iter(config.quantization_config["config_groups"].values()))["weights"]
    bits, size = weights["num_bits"], weights["group_size"] if weights["strategy"] == "group" else None
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            ours = (name for name in opened.keys() if name.endswith((_PACKED, _SCALE)))  # noqa: SIM118
            shapes |= {name: opened.get_slice(name).get_shape() for name in ours}
    for name in [name for name in shapes if name.endswith(_PACKED)]:
        rows, words = shapes[name]
        scale = shapes.get(name.removesuffix(_PACKED) + _SCALE, [0, 0])
        right = scale[1:] == [1] if size is None else ceil(scale[-1] * size * bits / 32) == words
        if len(scale) != 2 or scale[0] != rows or not right:
            raise ValueError(f"{name} has scales of shape {tuple(scale)}, which are not its own")


def unpacking() -> dict[str, Any]:
    """What `from_pretrained` must be told to unpack the weights on loading, not on the first forward."""
    require_compressed_tensors()
    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def unpacker(config: PreTrainedConfig) -> HfQuantizer | None:
    """By what transformers unpacks a checkpoint with this config, a matrix at a time; None for plain weights."""
    if not is_unpacked(config):
        return None
    require_compressed_tensors()
    quantizer = AutoHfQuantizer.from_config({**config.quantization_config, "dequantize": True}, pre_quantized=True)
    quantizer.validate_environment()  # where it learns what of it is in use
    return quantizer


@contextmanager
def unlogged(config: PreTrainedConfig) -> Iterator[None]:
    """Keeps still the library, which warns of every packed matrix on the `meta` device that its shape is a guess."""
    if not is_unpacked(config):
        yield
        return
    from loguru import logger  # the library's own

    logger.disable("compressed_tensors")
    try:
        yield
    finally:
        logger.enable("compressed_tensors")
