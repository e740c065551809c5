"""Checkpoints of packed integers (compressed-tensors): which of them are unpacked on loading, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import CompressedTensorsConfig, PreTrainedConfig
from transformers.integrations.compressed_tensors import CompressedTensorsDequantize
from transformers.quantizers import AutoHfQuantizer, HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from lyapunov_prune.errors import require_extra

_METHOD = "compressed-tensors"
_PACKED, _SCALE = ".weight_packed", ".weight_scale"
PACKER = "compressed_tensors", "packed", "packing weights"  # library, extra, and what needs it
DENSE = "weight"  # transformers' name for weights that its unpacking rule leaves alone
PACK = "pack-quantized"  # the library's name for integers of few bits packed into 32-bit words


def is_unpacked(config: Any) -> bool:
    """Whether `load` makes a dense model of a checkpoint with this config: only integer weights are packed.

    The matrices may be in several groups with different bits. Quantised activations or caches are refused, because a
    dense model would leave out their rounding.
    """
    packed = getattr(config, "quantization_config", None)
    if not isinstance(packed, dict) or packed.get("quant_method") != _METHOD:
        return False
    groups = packed.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return False
    more = [packed.get(key) for key in ("kv_cache_scheme", "transform_config", "sparsity_config")]
    return not any(more) and all(_holds_integers(group, packed.get("format")) for group in groups.values())


def _holds_integers(group: Any, format: Any) -> bool:
    """Whether a group in the config packs integer weights and does not quantise activations."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        return False
    weights = group["weights"]
    known = weights.get("type") == "int" and weights.get("strategy") in ("channel", "group")
    activations = group.get("input_activations") or group.get("output_activations")
    return known and not activations and (group.get("format") or format) == PACK


def is_loadable(config: PreTrainedConfig) -> bool:
    """Whether `load` accepts these quantised weights: it unpacks them, or leaves them to a library's kernels."""
    packed = getattr(config, "quantization_config", None)
    other = isinstance(packed, dict) and packed.get("quant_method") != _METHOD
    return other or is_unpacked(config)


def require_scales(files: Iterable[Path], config: PreTrainedConfig) -> None:
    """Raise ValueError for scales of the wrong shape, which torch would broadcast over their matrices.

    A matrix of m rows is packed as (m, ⌈n · bits / 32⌉) with scales (m, 1) or (m, n / group size). With several groups
    a matrix must fit one that names it, or any group if none does (files may use other names).
    """
    groups = list(config.quantization_config["config_groups"].values())
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            ours = (name for name in opened.keys() if name.endswith((_PACKED, _SCALE)))  # noqa: SIM118
            shapes |= {name: opened.get_slice(name).get_shape() for name in ours}
    for name in [name for name in shapes if name.endswith(_PACKED)]:
        module = name.removesuffix(_PACKED)
        scale = shapes.get(module + _SCALE, [0, 0])
        named = [group for group in groups if module in (group.get("targets") or ())] or groups
        if not any(_fits(shapes[name], scale, group["weights"]) for group in named):
            raise ValueError(f"{name} has scales of shape {tuple(scale)}, which are not its own")


def _fits(packed: list[int], scale: list[int], weights: dict[str, Any]) -> bool:
    rows, words = packed
    if len(scale) != 2 or scale[0] != rows:
        return False
    if weights["strategy"] != "group":
        return scale[1] == 1
    return ceil(scale[1] * weights["group_size"] * weights["num_bits"] / 32) == words


class _ByGroup(CompressedTensorsDequantize):
    """Unpacks each matrix by the group that names it; transformers' own rule uses one group for all."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        from compressed_tensors.utils.match import match_targets

        groups = self.hf_quantizer.compressor.quantization_config.config_groups
        scheme = None
        if len(groups) > 1 and any("weight_scale" in key for key in input_dict):
            name = kwargs["full_layer_name"].rpartition(".")[0]
            owner = {target: group for group in groups.values() for target in group.targets}
            found = match_targets(name, kwargs["model"].get_submodule(name), owner)
            if not found:
                raise ValueError(f"{name} is packed, and no group of the config names it")
            scheme = owner[found[0]]
        return CompressedTensorsDequantize(self.hf_quantizer, scheme).convert(input_dict, *args, **kwargs)


class _Quantizer(CompressedTensorsHfQuantizer):
    def get_load_operations(self) -> dict[str, type]:
        return {"dequantize": _ByGroup}


def unpacking() -> dict[str, Any]:
    """Arguments for `from_pretrained` that unpack the weights on loading instead of on the first forward."""
    require_extra(*PACKER)
    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def unpacker(config: PreTrainedConfig) -> HfQuantizer | None:
    """The transformers quantizer that unpacks a checkpoint with this config by matrix; None for plain weights."""
    if not is_unpacked(config):
        return None
    require_extra(*PACKER)
    with unpacked_by_group(config):
        quantizer = AutoHfQuantizer.from_config({**config.quantization_config, "dequantize": True}, pre_quantized=True)
    quantizer.validate_environment()  # this call initialises the quantizer
    return quantizer


@contextmanager
def unpacked_by_group(config: PreTrainedConfig) -> Iterator[None]:
    """Inside the block, transformers unpacks every matrix of a checkpoint with this config by its own group."""
    if not is_unpacked(config):
        yield
        return
    before = AUTO_QUANTIZER_MAPPING[_METHOD]
    AUTO_QUANTIZER_MAPPING[_METHOD] = _Quantizer
    try:
        with unlogged(config):
            yield
    finally:
        AUTO_QUANTIZER_MAPPING[_METHOD] = before


@contextmanager
def unlogged(config: PreTrainedConfig) -> Iterator[None]:
    """Silence the library, which warns for every packed matrix on the `meta` device that its shape is a guess."""
    if not is_unpacked(config):
        yield
        return
    from loguru import logger  # the library's own

    logger.disable("compressed_tensors")
    try:
        yield
    finally:
        logger.enable("compressed_tensors")
