"""What a model's tensors are in a GGUF file: their names there, and their numbers as llama.cpp wants them.

llama.cpp permutes the rows of queries and keys of some families, adds one to norms of others, and transposes matrices;
transformers' reader undoes it. Here its reader is tried on the numbers 0, 1, 2, …, which tells what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.gguf_copy import Anew
from lyapunov_prune.models.gguf_header import Tensor

_ROUNDEST = gguf.GGMLQuantizationType.F16  # for a quantisation that the gguf package reads and does not write


@dataclass(frozen=True)
class Rounded:
    """A tensor of a model as a GGUF file holds it, under the `name` that it has there, and what it reads back as."""

    name: str
    quantisation: str
    anew: Anew
    back: torch.Tensor


def rounded(model: PreTrainedModel, changed: Mapping[str, torch.Tensor], before: Mapping[str, Tensor]) -> list[Rounded]:
    """The tensors `changed` of `model`, by its own names, each in the quantisation of what it was `before`.

    `before` goes by the names in a GGUF file of this model. What the gguf package cannot quantise to becomes float16.
    Raises LyapunovPruneError for a tensor that such a file does not hold as one.
    """
    architecture = model.config.model_type.removesuffix("_text")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = {own: name for name, own in get_gguf_hf_weights_map(model, processor).items()}
    made = []
    for own, values in changed.items():
        name = names.get(own)
        if name is None or name not in before:
            raise LyapunovPruneError(f"{own} changed, and a GGUF file holds no such tensor; write it plain")
        shape = tuple(reversed(before[name].dims))
        order, shift = _reading(processor, name, shape)
        stored = np.empty(order.size, dtype=np.float32)
        stored[order.ravel()] = values.detach().float().cpu().numpy().ravel() - shift
        kind, data = _quantised(stored.reshape(shape), before[name].kind)
        again = gguf.quants.dequantize(data, kind).reshape(shape).astype(np.float32)
        back = torch.from_numpy(again.ravel()[order.ravel()] + np.float32(shift)).reshape(values.shape)
        made.append(Rounded(name, kind.name, Anew(int(kind), data.tobytes()), back.to(values.dtype)))
    return made


def _reading(processor: Any, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Where each number of what is read stands in the file, and what reading adds to it."""
    numbers = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    read = processor.process(numbers, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
    shift = int(read.weights.min()) if read.name is not None and read.weights.dtype == np.int64 else 0
    if read.name is None or not np.array_equal(np.sort(read.weights, axis=None) - shift, numbers.ravel()):
        raise LyapunovPruneError(f"{name} changed, and how a GGUF file holds it is not known; write it plain")
    return read.weights - shift, shift


def _quantised(values: np.ndarray, kind: int) -> tuple[gguf.GGMLQuantizationType, np.ndarray]:
    try:
        known = gguf.GGMLQuantizationType(kind)
        return known, gguf.quants.quantize(values, known)
    except (NotImplementedError, ValueError, gguf.quants.QuantError):
        return _ROUNDEST, gguf.quants.quantize(values, _ROUNDEST)
