"""The matrices of a checkpoint made from a dense model, if nothing else differs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import SAME_LIMIT, sample_inputs
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.forward.replacement import replaced, with_data
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.decoder import Decoder, in_memory, model_of
from lyapunov_prune.models.plain import find_projections, require_readable, require_weights
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import require_versions


@dataclass(frozen=True)
class Written:
    """`matrices` holds `W'` (output × input) for every matrix `W` of the dense model, by name.

    `embeddings` are the tables of the compressed model (embedding, head) that differ from the dense model's, by name.
    """

    matrices: dict[str, torch.Tensor]
    embeddings: dict[str, torch.Tensor]

    def with_embeddings(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Inside the block `model` reads and predicts with these embeddings."""
        own = {model.get_parameter(name): tensor for name, tensor in self.embeddings.items()}
        return with_data({parameter: tensor.to(parameter.device) for parameter, tensor in own.items()})


@torch.no_grad()
def read_written(reading: Reading, compressed: PreTrainedModel) -> Written:
    """Read the matrices and embeddings of `compressed` that replace those of the dense model.

    Quantised weights that were unpacked on loading count as plain ones. The dense model must compute what `compressed`
    does when it uses them, which is tested on a few tokens.

    Raises LyapunovPruneError, naming the first difference, for another family, number of layers, parameter, shape or
    dtype; for a bias, norm or buffer that differs (an input scaled by another norm makes `W x − W' x` more than the
    error of one matrix); for different settings; for adapters and weights that stay packed; and if no matrix differs.
    """
    model, other = reading.model, _readable(compressed)
    _readable(model)
    ours, theirs = _tensors(reading, other)
    projections = find_projections(reading.decoder)
    matrices = {f"{p.module}.{p.parameter}" for p in projections}
    changed = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name].to(tensor.device))]
    tables = _embeddings(model)
    others = [name for name in changed if name not in matrices | tables]
    if others or not matrices.intersection(changed):
        what = "no other matrices than the dense one; there is nothing to check"
        if others:
            what = (
                f"another {others[0]}, and bounds are for matrices alone; give a model in which nothing but the "
                "matrices of the layers (and the embedding) was changed"
            )
        raise LyapunovPruneError(f"the compressed model has {what}")
    for name in changed:
        require_numbers(theirs[name], f"{name} of the compressed model", "make it again")
    weights = {p: p.weight(compressed) for p in projections}
    written = Written(
        {p.name: W for p, W in weights.items()},
        {name: theirs[name].detach() for name in changed if name not in matrices},
    )
    with written.with_embeddings(model):
        _require_same_forward(reading, other, {p: W.to(model.device) for p, W in weights.items()})
    return written


def _readable(model: PreTrainedModel | Decoder) -> Decoder:
    """The handle of a model whose matrices can be read as numbers, unpacked on loading or plain."""
    require_weights(model_of(model), "unadapted")
    decoder = in_memory(model)
    require_readable(decoder)
    return decoder


def _embeddings(model: PreTrainedModel) -> set[str]:
    """The names of the parameters of embeddings and of the head."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding) or module is head]
    return {f"{name}.{key}" for name in names for key, _ in model.get_submodule(name).named_parameters(recurse=False)}


def _tensors(reading: Reading, made: Decoder) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and buffers of both models, which must have the same names, shapes and dtypes."""
    structure, other, compressed = reading.structure, made.structure, made.model
    require_versions(structure, other)
    why = ""
    if is_compact(compressed) and not is_compact(reading.model):
        why = "is compact and does not store the dense model's matrices; check one that is compressed as plain"
    elif other.num_layers != structure.num_layers:
        why = (
            f"has {other.num_layers} layers and the dense one {structure.num_layers}: a layer that is gone has no "
            "matrices to compare; give DENSE PRUNED to hierarchy, or eval PRUNED --against DENSE"
        )
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (reading.model, compressed))
    for name in ours | theirs:
        mine, other_one = (_described(tensors.get(name)) for tensors in (ours, theirs))
        if mine != other_one:
            why = why or (
                f"has {name} {other_one}, and the dense one {mine}; give two versions of one model, both in one dtype "
                "(--dtype)"
            )
    if why:
        raise LyapunovPruneError(f"the compressed model {why}")
    return ours, theirs


def _described(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"


def _require_same_forward(reading: Reading, compressed: Decoder, written: Mapping[Projection, torch.Tensor]) -> None:
    """Compare logits, which also depend on settings without a parameter (window, rotary base, ε of a norm)."""
    inputs = sample_inputs(reading.decoder, reading.batch)
    with replaced(reading.model, written):
        logits = KeptLogits(reading.decoder, inputs)
    worst = logits.deviation(KeptLogits(compressed, inputs))
    if worst > SAME_LIMIT[reading.model.dtype]:
        raise LyapunovPruneError(
            f"with the compressed model's matrices the dense model gives other logits (by {worst:.2g}): "
            "their settings differ; compare the config.json of both"
        )
