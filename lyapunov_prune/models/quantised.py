"""Models from quantised checkpoints: those that are unpacked on loading, and those that stay packed for a library.

Packed integers of compressed-tensors are unpacked. A model with other packed weights (bitsandbytes, GPTQ, AWQ, or
anything else that transformers loads) can be run, so a measurement may use the states between its layers. Its layers'
weights are never read as numbers nor changed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import CompressedTensorsConfig, PreTrainedConfig
from transformers.integrations.compressed_tensors import CompressedTensorsDequantize
from transformers.quantizers import AutoHfQuantizer, HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from lyapunov_prune.errors import LyapunovPruneError, require_extra
from lyapunov_prune.results.files import parsed

# Where a config keeps the settings; older versions of compressed-tensors use the second name.
SETTINGS = ("quantization_config", "compression_config")
UNPACK = "give the original weights, or a GGUF file, which is dequantised on loading"
# Kernels of packed weights may round their inputs to this precision internally (bitsandbytes on the CPU).
UNSEEN_ROUNDING = torch.finfo(torch.bfloat16).eps


# The packages that transformers needs for each method, by their names on PyPI.
_PACKAGES = {
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "hqq": ("hqq",),
    "aqlm": ("aqlm",),
    "quanto": ("optimum-quanto",),
    "torchao": ("torchao",),
    "auto-round": ("auto-round",),
    "quark": ("amd-quark",),
    "eetq": ("kernels",),
    "fp8": ("kernels",),
    "mxfp4": ("kernels",),
}


def quantisation(config: Any) -> str:
    """A phrase for how the weights of a checkpoint with this config are packed; empty for plain weights."""
    method = _method(config)
    return "" if method is None else f"quantised ({method or 'an unnamed method'})"


def _method(config: Any) -> str | None:
    """The name of the method, empty if it is not given; None for plain weights."""
    inner = config.get_text_config(decoder=True) if isinstance(config, PreTrainedConfig) else None
    packed = getattr(config, "quantization_config", None) or getattr(inner, "quantization_config", None)
    if packed is None:
        return None
    method = packed.get("quant_method") if isinstance(packed, dict) else getattr(packed, "quant_method", None)
    return str(getattr(method, "value", method) or "")


def stored_quantisation(folder: Path) -> dict[str, Any] | None:
    """The quantisation settings in the config.json of `folder`; None for plain weights or without a config.json."""
    if not (folder / "config.json").is_file():  # reading a pipe would block
        return None
    try:
        config = parsed((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # loading reports the fault
        return None
    parts = [config, *(config.values() if isinstance(config, dict) else ())]
    found = [part.get(name) for part in parts if isinstance(part, dict) for name in SETTINGS]
    return next((settings for settings in found if isinstance(settings, dict)), None)


def is_packed(model: nn.Module) -> bool:
    """Whether the weights of `model` are quantised and were not unpacked on loading, according to transformers."""
    return bool(quantisation(getattr(model, "config", None))) and getattr(model, "is_quantized", True)


def require_kernels(config: PreTrainedConfig, device_map: Any) -> None:
    """Raise what transformers raises if it does not know the method of `config` or lacks its library.

    Raises RuntimeError if transformers would unpack the weights instead, since that omits the kernels' rounding of
    activations.
    """
    quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
    quantizer.validate_environment(device_map=device_map, weights_only=True)
    if getattr(quantizer.quantization_config, "dequantize", False):
        raise RuntimeError("no kernel for them runs on this machine")


def remedy(config: PreTrainedConfig, error: Exception) -> str:
    """What to do about `error` of `require_kernels`: the missing packages to install."""
    missing = " ".join(name for name in _PACKAGES.get(_method(config) or "", ()) if not _is_installed(name))
    if isinstance(error, RuntimeError):
        return f"load them on a machine with a GPU{missing and f' (pip install {missing})'}, or {UNPACK}"
    return f"{f'run: pip install {missing}' if missing else 'install what is missing'}, or {UNPACK}"


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def packed_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint of `model`, whose weights are packed, one module at a time.

    A module with its own `_save_to_state_dict` is copied first: bitsandbytes on the CPU destroys what its kernel needs
    when it answers, and the model would compute something else from then on.
    """
    for name, module in model.named_modules():
        ordinary = type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        entries: dict[str, Any] = {}
        (module if ordinary else copy.deepcopy(module))._save_to_state_dict(entries, f"{name}." if name else "", True)
        yield from ((key, tensor) for key, tensor in entries.items() if isinstance(tensor, torch.Tensor))


_METHOD = "compressed-tensors"
_PACKED, _SCALE = ".weight_packed", ".weight_scale"
_ORDERED = ("group", "dynamic", "true")  # what compressed-tensors no longer knows
# The order of columns is left out on unpacking, and so are the zero points of experts, which are fused.
_UNREAD = re.compile(r"\.weight_g_idx$|\.experts\.\d+\..*weight_zero_point$")
_NOT_READ = f"which transformers does not apply when it unpacks; {UNPACK}"
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
    """Raise LyapunovPruneError for what transformers does not unpack, and for scales of the wrong shape.

    It would leave out an order of columns, and it has no zero points for fused experts. Scales of another shape would
    be broadcast over their matrices.

    A matrix of m rows is packed as (m, ⌈n · bits / 32⌉) with scales (m, 1) or (m, n / group size). With several groups
    a matrix must fit one that names it, or any group if none does (files may use other names).
    """
    groups = list(config.quantization_config["config_groups"].values())
    if any(str(group["weights"].get("actorder")).lower() in _ORDERED for group in groups):
        raise LyapunovPruneError(f"the columns of its groups are in an order of their own (actorder), {_NOT_READ}")
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            ours = (name for name in names if name.endswith((_PACKED, _SCALE)) or _UNREAD.search(name))
            shapes |= {name: opened.get_slice(name).get_shape() for name in ours}
    if unread := [name for name in shapes if _UNREAD.search(name)]:
        raise LyapunovPruneError(f"the checkpoint holds {unread[0]}, {_NOT_READ}")
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
