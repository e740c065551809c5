"""The matrices of a checkpoint made from a dense model, if nothing else differs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import SAME_LIMIT, sample_inputs
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.forward.replacement import replaced
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.plain import plain
from lyapunov_prune.models.projections import Projection, find_projections
from lyapunov_prune.models.structure import scale_weights


@torch.no_grad()
def written_matrices(reading: Reading, compressed: PreTrainedModel) -> dict[str, torch.Tensor]:
    """`W'` (output × input) of `compressed` for every matrix `W` of the model, by name.

    The dense model must compute what `compressed` does when it uses these matrices, which is tested on a few tokens.

    Raises LyapunovPruneError, naming the first difference, for another family, number of layers, parameter, shape or
    dtype; for a bias, norm, embedding or buffer that differs (an input scaled by another norm makes `W x − W' x` more
    than the error of one matrix); for different settings; for adapters and quantised weights; and where nothing
    differs.
    """
    model = reading.model
    plain(reading.decoder)
    other = plain(compressed)
    scale_weights(compressed)  # as for the dense model
    ours, theirs = _tensors(reading, other)
    projections = find_projections(reading.decoder)
    matrices = {f"{p.module}.{p.parameter}" for p in projections}
    changed = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name].to(tensor.device))]
    if not changed:
        raise LyapunovPruneError("the compressed model is the dense one, weight for weight; there is nothing to check")
    if others := [name for name in changed if name not in matrices]:
        raise LyapunovPruneError(
            f"the compressed model has another {others[0]}, and bounds are for matrices alone; give a model in which "
            "nothing but the matrices of the layers was changed"
        )
    if broken := [name for name in changed if not theirs[name].isfinite().all()]:
        raise LyapunovPruneError(f"{broken[0]} of the compressed model holds NaN or infinity; make it again")
    written = {p: p.weight(compressed) for p in projections}
    _require_same_forward(reading, other, {p: W.to(model.device) for p, W in written.items()})
    return {p.name: W for p, W in written.items()}


def _tensors(reading: Reading, made: Decoder) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and buffers of both models, which must have the same names, shapes and dtypes."""
    structure, other, compressed = reading.structure, made.structure, made.model
    if is_compact(compressed) and not is_compact(reading.model):
        raise LyapunovPruneError(
            "the compressed model is compact and does not store the dense model's matrices; compress or prune again "
            "with --format plain, and check that"
        )
    if other.model_type != structure.model_type:
        raise LyapunovPruneError(
            f"the compressed model is a {other.model_type} and the dense one a {structure.model_type}; give two "
            "versions of one model"
        )
    if other.num_layers != structure.num_layers:
        raise LyapunovPruneError(
            f"the compressed model has {other.num_layers} layers and the dense one {structure.num_layers}: a layer "
            "that is gone has no matrices to compare; give DENSE PRUNED to hierarchy, or eval PRUNED --against DENSE"
        )
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (reading.model, compressed))
    for name in ours | theirs:
        mine, other_one = (_described(tensors.get(name)) for tensors in (ours, theirs))
        if mine != other_one:
            raise LyapunovPruneError(
                f"{name} is {other_one} in the compressed model and {mine} in the dense one; give two versions of one "
                "model, both in one dtype (--dtype)"
            )
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
