"""Models from quantised checkpoints: those that are unpacked on loading, and those that stay packed for a library.

What a reader of `table.READERS` reads is unpacked. A model with other packed weights (bitsandbytes, GPTQ, AWQ, or
anything else that transformers loads) can be run, so a measurement may use the states between its layers. Its layers'
weights are never read as numbers nor changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.core_model_loading import ConversionOps, _IdentityOp
from transformers.quantizers import AutoHfQuantizer, HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.reader import UNPACK, Reader
from lyapunov_prune.models.table import READERS
from lyapunov_prune.results.files import parsed

# Where a config keeps the settings; older versions of compressed-tensors use the second name.
SETTINGS = ("quantization_config", "compression_config")
# Kernels of packed weights may round their inputs to this precision internally (bitsandbytes on the CPU).
UNSEEN_ROUNDING = torch.finfo(torch.bfloat16).eps
PLAIN = "weight"  # the tensor of a module whose matrix is not packed


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


def is_known(config: PreTrainedConfig) -> bool:
    """Whether transformers knows the method of `config`, or none is named there."""
    return not _method(config) or AutoHfQuantizer.supports_quant_method(config.quantization_config)


def require_kernels(config: PreTrainedConfig, device_map: Any) -> None:
    """Raise what transformers raises if it lacks the library for the method of `config`.

    Raises LyapunovPruneError for a method that nothing reads, and for weights that the config has unpacked. Raises
    RuntimeError if transformers would unpack them for want of a kernel, since that omits the kernels' rounding of
    activations.
    """
    if not is_known(config):
        raise LyapunovPruneError("neither this package nor transformers has a reader for them")
    quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
    if getattr(quantizer.quantization_config, "dequantize", False):
        raise LyapunovPruneError("the config has them unpacked, and this package has no reader for them")
    quantizer.validate_environment(device_map=device_map, weights_only=True)
    if getattr(quantizer.quantization_config, "dequantize", False):
        raise RuntimeError("no kernel for them runs on this machine")


def remedy(config: PreTrainedConfig, error: Exception) -> str:
    """What to do about `error` of `require_kernels`: the missing packages to install."""
    missing = " ".join(name for name in _PACKAGES.get(_method(config) or "", ()) if not _is_installed(name))
    if isinstance(error, RuntimeError):
        return f"load them on a machine with a GPU{missing and f' (pip install {missing})'}, or {UNPACK}"
    if isinstance(error, LyapunovPruneError):
        return UNPACK
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


def reader_of(config: Any) -> Reader | None:
    """What makes a plain model of a checkpoint with this config; None for plain weights, and if they stay packed."""
    packed = getattr(config, "quantization_config", None)
    if not isinstance(packed, dict) or packed.get("quant_method") not in READERS:
        return None
    reader = READERS.make(packed["quant_method"], settings=packed)
    return reader if reader.reads() else None


def is_loadable(config: PreTrainedConfig) -> bool:
    """Whether `load` accepts these quantised weights: a reader unpacks them, or a library's kernels read them."""
    packed = getattr(config, "quantization_config", None)
    return isinstance(packed, dict) and (packed.get("quant_method") not in READERS or reader_of(config) is not None)


class _ReadBy(QuantizationConfigMixin):
    def __init__(self, quant_method: Any, **settings: Any) -> None:
        self.quant_method, self.dequantize = quant_method, True


class _Unpack(ConversionOps):
    """Unpacks one matrix, or that of every expert."""

    def __init__(self, quantizer: _Quantizer) -> None:
        self.hf_quantizer = quantizer  # by an attribute of this name the loader sees that it must not cast the parts

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unpack:  # the loader copies rules for every tensor
        return self

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        model, target = kwargs["model"], kwargs["full_layer_name"]
        name, dtype = target.rpartition(".")[0], model.get_parameter(target).dtype
        packed: dict[str, dict[str, list[torch.Tensor]]] = {}
        for key, tensors in input_dict.items():  # each a part of one matrix, or of all of a projection
            stem, _, part = key.rpartition(".")
            packed.setdefault(stem, {})[part] = tensors
        return {
            f"{stem}.{next(iter(parts))}" if stem else target: [
                self._plain(dict(zip(parts, each, strict=True)), name, model).to(dtype)
                for each in zip(*parts.values(), strict=True)
            ]
            for stem, parts in packed.items()
        }

    def _plain(self, stored: dict[str, torch.Tensor], name: str, model: nn.Module) -> torch.Tensor:
        if stored.keys() == {PLAIN}:
            return stored[PLAIN]
        return self.hf_quantizer.reader.unpack(stored, name, model.get_submodule(name))

    @property
    def reverse_op(self) -> ConversionOps:
        return _IdentityOp()


class _Quantizer(HfQuantizer):
    """Has transformers unpack a checkpoint by a reader, and leave a plain model."""

    is_trainable = True

    def __init__(self, settings: QuantizationConfigMixin, reader: Reader, **options: Any) -> None:
        super().__init__(settings, **options)
        self.reader = reader
        self.serialized_names = {PLAIN: [*dict.fromkeys((PLAIN, *reader.parts))]}

    def is_serializable(self) -> bool:
        return True

    def get_load_operations(self) -> dict[str, type]:
        return {"dequantize": _Unpack}


def unpacker(config: PreTrainedConfig) -> HfQuantizer | None:
    """What has transformers unpack a checkpoint with this config; None without a reader."""
    reader = reader_of(config)
    return None if reader is None else _Quantizer(_ReadBy(**reader.settings), reader)


@contextmanager
def unpacking(reader: Reader | None) -> Iterator[None]:
    """Inside the block, transformers unpacks the checkpoints of the method of `reader` by it."""
    with ExitStack() as tables:
        if reader is not None:
            made: Any = partial(_Quantizer, reader=reader)
            tables.enter_context(patch.dict(AUTO_QUANTIZER_MAPPING, {reader.name: made}))
            tables.enter_context(patch.dict(AUTO_QUANTIZATION_CONFIG_MAPPING, {reader.name: _ReadBy}))
        yield
