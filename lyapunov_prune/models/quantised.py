"""Models from quantised checkpoints, including those whose weights stay packed for a library's kernels.

A model with packed weights (bitsandbytes, GPTQ, AWQ, or anything else that transformers loads) can be run, so a
measurement may use the states between its layers. Its layers' weights are never read as numbers nor changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers import AutoHfQuantizer

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
