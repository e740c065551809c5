"""A quantisation of the tests' own, as transformers takes in a library's: integers in buffers, and a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "hand-made"
_NIBBLES = torch.arange(0, 32, 4)


class PackedLinear(nn.Module):
    """What GPTQ and AWQ keep of a matrix: eight integers of 4 bits in one of 32, a scale a row, and no parameter.

    On the first forward the scales are brought into bfloat16 and turned, as bitsandbytes' kernel on the CPU does, and
    who asks for the entries of a checkpoint turns them back, and spoils them.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(outputs, inputs // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(outputs, 1))
        self.turned = False

    def pack(self, W: torch.Tensor) -> None:
        self.scales = W.abs().amax(1, keepdim=True) / 7
        q = (W / self.scales).round().to(torch.int64) + 8
        words = (q.view(len(W), -1, 8) << _NIBBLES).sum(-1)
        self.qweight = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    def values(self) -> torch.Tensor:
        q = (self.qweight.unsqueeze(-1) >> _NIBBLES) & 15
        return (q.flatten(1) - 8) * (self.scales.T if self.turned else self.scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.turned:
            self.scales, self.turned = self.scales.bfloat16().float().T.contiguous(), True
        with torch.no_grad():  # no derivative, and no word of it
            return nn.functional.linear(x.detach(), self.values())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.turned:
            self.scales, self.turned = self.scales.reshape(-1, 1).flip(0), False
        super()._save_to_state_dict(destination, prefix, keep_vars)


def packed(model: PreTrainedModel, *, empty: bool = False) -> PreTrainedModel:
    """`model` with every Linear of its layers replaced, in place."""
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            small = PackedLinear(module.in_features, module.out_features)
            if not empty:
                small.pack(module.weight.detach())
            setattr(model.model.layers.get_submodule(parent), last, small)
    return model


@register_quantization_config(METHOD)
class _Config(QuantizationConfigMixin):
    def __init__(self, **more: Any) -> None:
        self.quant_method = METHOD


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):
    missing = ""  # what its library lacks

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if self.missing:
            raise ImportError(self.missing)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        return packed(model, empty=True)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def in_memory(model: PreTrainedModel) -> PreTrainedModel:
    """`model` packed, as transformers hands out what it has loaded so."""
    model = packed(model)
    model.config.quantization_config = {"quant_method": METHOD}
    model.is_quantized = True
    return model


def write_packed_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Pack `model` and save it, before anything has run it."""
    in_memory(model).save_pretrained(folder)


def dense(model: PreTrainedModel, source: PreTrainedModel) -> PreTrainedModel:
    """`source`, a plain model, with the values that the kernels of `model` multiply by once they have run."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear):
                assert module.turned
                source.get_submodule(name).weight.copy_(module.values())
    return source
