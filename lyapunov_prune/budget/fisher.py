"""The diagonal of the Fisher information: how much a prediction minds a change of each weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lyapunov_prune.budget.gradients import groups_of, room_for_sums, slope, squared
from lyapunov_prune.budget.streamed import layer_by_layer
from lyapunov_prune.forward.dealing import dealt, summed
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.models.experts import stacks
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import track


def matrices_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of `model` by name; one that modules share stands once, under its first name.

    The experts of a layer that one tensor holds are one of them (experts × rows × columns). Routers and matrices of one
    row are none: files of few bits keep them wide, since they are small and choose.
    """
    layers = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding) and len(m.weight) > 1]
    experts = [stack.parameter for m in model.modules() for stack in stacks(m) if stack.routed]
    found = {id(p) for p in (*layers, *experts)}
    return {name: p for name, p in model.named_parameters() if id(p) in found}


def fisher(
    reading: Reading, matrices: Mapping[str, nn.Parameter], seed: int, folder: Path | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The name and the diagonal `F` (float32, per token) of each of `matrices`, one after the other.

    `F_ij = E_t E_{y∼p_t} (∂ log p_t(y) / ∂W_ij)²`, so that a small change costs `KL ≈ ½ Σ_ij F_ij ΔW_ij²` nats a
    token. One label is drawn from the model at every position of a window, and the gradient of their summed
    log-likelihood is squared: scores of labels drawn from the model are uncorrelated, so its mean is the sum over
    positions. A matrix that modules share has the sum of their gradients.

    As many matrices are summed at once as memory holds, with a forward and a backward of the batch for each group. A
    streamed model goes through its layers once forwards and once backwards, and each matrix is yielded while its layer
    is held (`streamed.layer_by_layer`). Raises LyapunovPruneError for gradients that are not finite.
    """
    each = _all_at_once if reading.decoder.stream is None else partial(layer_by_layer, folder=folder)
    for name, total in each(reading, matrices, seed):
        found = total / reading.batch.tokens
        require_numbers(found, f"gradients of {name}")
        yield name, found


def _all_at_once(
    reading: Reading, matrices: Mapping[str, nn.Parameter], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for group in groups_of(matrices, room_for_sums(reading)):
        sums = _sums(reading, {name: matrices[name] for name in group}, seed)
        for name in track(group, "costs"):
            yield name, sums.pop(name)


@in_eval_mode
def _sums(reading: Reading, matrices: Mapping[str, nn.Parameter], seed: int) -> dict[str, torch.Tensor]:
    model = reading.model

    def differentiate(number: int, ids: torch.Tensor) -> None:
        logits = model(ids, use_cache=False).logits
        logits.backward(slope(logits, seed, number))

    with squared(model, matrices) as sums:
        dealt(reading, 1, differentiate, "gradients")
    summed(model, *sums.values())
    return sums
