"""The diagonal of the Fisher information: how much a prediction minds a change of each weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from lyapunov_prune.forward.dealing import dealt, summed
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.models.device import free_memory
from lyapunov_prune.models.experts import stacks
from lyapunov_prune.models.launched import from_each
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import track

_SHARE = 0.6  # of the free memory, for the sums of the matrices that are summed at once


def matrices_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of `model` by name; one that modules share stands once, under its first name.

    The experts of a layer that one tensor holds are one of them (experts × rows × columns). Routers and matrices of one
    row are none: files of few bits keep them wide, since they are small and choose.
    """
    layers = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding) and len(m.weight) > 1]
    experts = [stack.parameter for m in model.modules() for stack in stacks(m) if stack.routed]
    found = {id(p) for p in (*layers, *experts)}
    return {name: p for name, p in model.named_parameters() if id(p) in found}


def fisher(reading: Reading, matrices: Mapping[str, nn.Parameter], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The name and the diagonal `F` (float32, per token) of each of `matrices`, one after the other.

    `F_ij = E_t E_{y∼p_t} (∂ log p_t(y) / ∂W_ij)²`, so that a small change costs `KL ≈ ½ Σ_ij F_ij ΔW_ij²` nats a
    token. One label is drawn from the model at every position of a window, and the gradient of their summed
    log-likelihood is squared: scores of labels drawn from the model are uncorrelated, so its mean is the sum over
    positions. A matrix that modules share has the sum of their gradients.

    As many matrices are summed at once as memory holds, with a forward and a backward of the batch for each group.
    Raises LyapunovPruneError for gradients that are not finite.
    """
    room = min(from_each(reading.model, free_memory(str(reading.model.device))))  # all processes take the same groups
    for group in _groups(matrices, _SHARE * room):
        sums = _sums(reading, {name: matrices[name] for name in group}, seed)
        for name in track(group, "costs"):
            found = sums.pop(name) / reading.batch.tokens
            require_numbers(found, f"gradients of {name}")
            yield name, found


def _groups(matrices: Mapping[str, nn.Parameter], room: float) -> list[list[str]]:
    """The names in order, in groups whose float32 sums take `room` bytes at most, or one matrix."""
    groups: list[list[str]] = []
    taken = 0.0
    for name, p in matrices.items():
        size = 4 * p.numel()
        if not groups or taken + size > room:
            groups.append([])
            taken = 0.0
        groups[-1].append(name)
        taken += size
    return groups


@in_eval_mode
def _sums(reading: Reading, matrices: Mapping[str, nn.Parameter], seed: int) -> dict[str, torch.Tensor]:
    model = reading.model
    sums = {name: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for name, p in matrices.items()}

    def add(name: str, p: nn.Parameter) -> None:
        assert p.grad is not None
        sums[name].addcmul_(p.grad.float(), p.grad.float())
        p.grad = None

    def differentiate(number: int, ids: torch.Tensor) -> None:
        logits = model(ids, use_cache=False).logits[0]
        random = torch.Generator().manual_seed(seed * 1_000_003 + number)
        with torch.no_grad():
            score = logits.float().softmax(-1)
            drawn = torch.multinomial(score.cpu(), 1, generator=random).to(score.device)
            score.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=score.dtype))
        logits.backward(score.to(logits.dtype))  # of −log p(drawn), summed over positions

    with _only(list(model.parameters()), list(matrices.values())), torch.enable_grad():
        handles = [p.register_post_accumulate_grad_hook(partial(add, name)) for name, p in matrices.items()]
        try:
            dealt(reading, 1, differentiate, "gradients")
        finally:
            for handle in handles:
                handle.remove()
    summed(model, *sums.values())
    return sums


@contextmanager
def _only(parameters: Sequence[nn.Parameter], some: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within the block only `some` of the parameters take gradients, and none has one that it had before."""
    before = [(p.requires_grad, p.grad) for p in parameters]
    for p in parameters:
        p.grad = None
        p.requires_grad_(any(p is each for each in some))
    try:
        yield
    finally:
        for p, (taken, grad) in zip(parameters, before, strict=True):
            p.requires_grad_(taken)
            p.grad = grad
