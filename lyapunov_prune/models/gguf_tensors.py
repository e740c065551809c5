"""The tensors of a model in a GGUF file: their names there, and their numbers in llama.cpp's layout.

For some families llama.cpp permutes the rows of queries and keys, adds one to norms, or transposes matrices, and
transformers' reader undoes it. To learn what the reader does, it is run on the numbers 0, 1, 2, …
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby, repeat
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.digest import saved_tensors
from lyapunov_prune.models.ggml import Kind, bits_of, dequantised, fits, quantised
from lyapunov_prune.models.gguf_copy import Anew, Piece, whole
from lyapunov_prune.models.gguf_header import Tensor
from lyapunov_prune.models.gguf_metadata import GGUFFamily, rope_tensors
from lyapunov_prune.models.how import How
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.progress import track

_ROUTER, _SHARED_GATE = ".ffn_gate_inp", ".ffn_gate_inp_shexp"
_MOVES = (0.01, 0.5)  # largest relative change by rounding to 16 bits or more, and to fewer


@dataclass(frozen=True)
class Rounded:
    """A tensor as a GGUF file holds it: its name there, quantisation, bytes, and the values that it reads back to."""

    name: str
    quantisation: str
    anew: Anew
    back: torch.Tensor


def names_in_file(model: PreTrainedModel) -> dict[str, str]:
    """The names of tensors in a GGUF file by those in `model`, which is read from such files."""
    return {own: name for name, own in get_gguf_hf_weights_map(model, _processor(model)).items()}


def _processor(model: PreTrainedModel) -> TensorProcessor:
    architecture = model.config.model_type.removesuffix("_text")
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())


def rounded(
    model: PreTrainedModel,
    changed: Mapping[str, torch.Tensor],
    before: Mapping[str, Tensor],
) -> list[Rounded]:
    """The tensors `changed` (keyed by the model's names), each in the quantisation that it has in `before`.

    `before` is keyed by the names in a GGUF file of this model. Raises LyapunovPruneError for a tensor that such a file
    does not hold as one tensor, and as `ggml.quantised`.
    """
    processor, names = _processor(model), names_in_file(model)
    made = []
    for own, values in changed.items():
        name = names.get(own)
        if name is None or name not in before:
            raise LyapunovPruneError(f"{own} changed, and a GGUF file cannot store such a tensor; write it plain")
        shape = tuple(reversed(before[name].dims))
        order, shift = _reading(processor, name, shape)
        stored = np.empty(order.size, dtype=np.float32)
        stored[order.ravel()] = values.detach().float().cpu().numpy().ravel() - shift
        kind, data = _quantised(name, stored.reshape(shape), How(Kind(before[name].kind)))
        again = dequantised(data, kind).reshape(shape)
        back = torch.from_numpy(again.ravel()[order.ravel()] + np.float32(shift)).reshape(values.shape)
        made.append(Rounded(name, kind.name, Anew(int(kind), data.tobytes()), back.to(values.dtype)))
    return made


def _reading(processor: Any, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """For each number that is read: its position in the file, and the constant that reading adds."""
    numbers = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    read = processor.process(numbers, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
    shift = int(read.weights.min()) if read.name is not None and read.weights.dtype == np.int64 else 0
    if read.name is None or not np.array_equal(np.sort(read.weights, axis=None) - shift, numbers.ravel()):
        raise LyapunovPruneError(f"{name} changed, and it is not known how a GGUF file stores it; write it plain")
    return read.weights - shift, shift


def _quantised(name: str, values: np.ndarray, how: How) -> tuple[Kind, np.ndarray]:
    """The matrix or experts `name` in the type of `how`; in Q8_0 or float16 if its rows are not whole blocks of it.

    Raises LyapunovPruneError for a number that float16 cannot hold.
    """
    kind = next(kind for kind in (how.kind, Kind.Q8_0, Kind.F16) if fits(kind, values.shape[-1]))
    if kind == Kind.F16 and (largest := np.abs(values).max()) > (most := np.finfo(np.float16).max):
        raise LyapunovPruneError(f"{name} holds {largest:.5g}, and f16 ends at {most:.5g}; give --quantize bf16")
    importance = how.importance
    if importance is None or importance.ndim == 1:
        return kind, quantised(values.reshape(-1, values.shape[-1]), kind, importance)
    return kind, np.concatenate([quantised(*each) for each in zip(values, repeat(kind), importance, strict=False)])


def stored_tensors(
    decoder: Decoder, family: GGUFFamily, quantisation: str, chosen: Mapping[str, How]
) -> Iterator[tuple[str, Piece, float]]:
    """The tensors of a GGUF file of a whole model, each with its name there and the relative error of rounding.

    The model is changed alike, a streamed one in the layer that is held. Matrices are rounded as `chosen` says, keyed
    by the model's names, or are stored there already, and others to `quantisation`; below 8 bits the embeddings then
    become Q8_0, as in llama.cpp. Vectors and routers stay float32, and matrices whose rows are not whole blocks become
    Q8_0 or float16. Experts whose gates and ups are one tensor become two in the file. The error is
    ‖after − before‖ / ‖stored‖ (Frobenius), divided by the most that such rounding can cause (`_MOVES`): above 1
    something is wrong.
    Raises LyapunovPruneError for a tensor that llama.cpp has no name for.
    """
    config = decoder.model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for own, tensor in _in_turn(decoder):  # tied ones once: without an output matrix llama.cpp uses the embeddings
        how = chosen.get(own)
        for known, part in _parts(own, tensor):
            name = names.get_name(known, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise LyapunovPruneError(f"llama.cpp has no tensor for {own} in {family.architecture}; write it plain")
            name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
            before = part.detach().float().clone()
            values = _laid_out(name, before.cpu(), config, family, into_file=True)
            if how is not None and how.stored is not None:
                kind, data = how.kind, _laid_out(name, how.stored[0], config, family, into_file=True).numpy()
                most = math.inf  # feedback moves a matrix further than rounding
            else:
                kind, data = _quantised(name, values.numpy(), how or _how(name, values, quantisation))
                most = _MOVES[bits_of(kind) < 16]
            piece = _piece(name, values, kind, data)
            part.copy_(read_back(piece, config, family))
            moved = float((part.float() - before).norm() / values.norm().clamp_min(1e-30).to(part.device))
            yield own, piece, moved / most
    for name, values in rope_tensors(config).items():
        yield name, _piece(name, values, Kind.F32, values.numpy()), 0.0


def _in_turn(decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, a shared one once; those of a layer while it is held."""
    names = track([name for name, _ in saved_tensors(decoder.model)], "rounding")
    for layer, some in groupby(names, decoder.structure.layer_of):
        with nullcontext() if layer is None else layer_held(decoder.model, layer):
            tensors = decoder.model.state_dict()
            yield from ((name, tensors[name]) for name in some)


def read_back(piece: Piece, config: PretrainedConfig, family: GGUFFamily) -> torch.Tensor:
    """The numbers of a piece of `stored_tensors` in the layout of the model."""
    kind, shape = Kind(piece.kind), piece.source.dims[::-1]
    data = np.frombuffer(whole(piece), np.uint8).reshape(prod(shape[:-1]), -1)
    values = torch.from_numpy(dequantised(data, kind).reshape(shape))
    return _laid_out(piece.name, values, config, family, into_file=False)


def put_back(
    own: str, memory: torch.Tensor, pieces: Sequence[Piece], config: PretrainedConfig, family: GGUFFamily
) -> None:
    """Fill the tensor `own` of the model with the numbers of its `pieces`, in their order in `stored_tensors`."""
    for (_, part), piece in zip(_parts(own, memory), pieces, strict=True):
        part.copy_(read_back(piece, config, family))


def _parts(own: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors of the file that `tensor` holds, under the names that checkpoints had for them, as views."""
    start, fused, end = own.partition(".experts.gate_up_proj")
    if fused:
        return [
            (f"{start}.experts.{each}_proj{end}", part)
            for each, part in zip(("gate", "up"), tensor.chunk(2, 1), strict=True)
        ]
    return [(own, tensor)]


def _piece(name: str, values: torch.Tensor, kind: Kind, data: np.ndarray) -> Piece:
    dims = tuple(reversed(values.shape))
    return Piece(name, Tensor(name, dims, int(kind), Path(), 0, data.nbytes), Anew(int(kind), data.tobytes()))


def _how(name: str, values: torch.Tensor, quantisation: str) -> How:
    if values.ndim == 1 or _ROUTER in name:
        return How(Kind.F32)
    kind = Kind[quantisation.upper()]
    outer = name in ("token_embd.weight", "output.weight") and bits_of(kind) < 8
    return How(Kind.Q8_0 if outer else kind)


def _laid_out(
    name: str, values: torch.Tensor, config: PretrainedConfig, family: GGUFFamily, *, into_file: bool
) -> torch.Tensor:
    """The model's numbers in llama.cpp's layout, or back: rotary halves become pairs, and norms gain one.

    The gate of a shared expert, a matrix of one row, is a vector there.
    """
    if _SHARED_GATE in name:
        return values.flatten() if into_file else values[None]
    if family.shifted and name.endswith("norm.weight"):
        return values + 1 if into_file else values - 1
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    count = next((count for part, count in heads.items() if family.permuted and part in name), None)
    if count is None:
        return values
    split = (2, -1) if into_file else (-1, 2)
    return values.reshape(count, *split, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
