"""Sums of squared gradients: labels drawn from the model, and squares that are added as a backward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.models.device import free_memory
from lyapunov_prune.models.launched import from_each

_SHARE = 0.6  # of the free memory, for the sums of the matrices that are summed at once


def room_for_sums(reading: Reading) -> float:
    """The bytes of sums that are in memory at once: one number for all processes, which take the same groups."""
    return _SHARE * min(from_each(reading.model, free_memory(str(reading.model.device))))


def groups_of(matrices: Mapping[str, nn.Parameter], room: float) -> list[list[str]]:
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


@torch.no_grad()
def slope(logits: torch.Tensor, seed: int, number: int) -> torch.Tensor:
    """`∂ −Σ_t log p_t(y_t) / ∂ logits` (1 × tokens × vocabulary) for labels `y_t` drawn for the window `number`."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + number)
    score = logits[0].float().softmax(-1)
    drawn = torch.multinomial(score.cpu(), 1, generator=random).to(score.device)
    score.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=score.dtype))
    return score.to(logits.dtype)[None]


@contextmanager
def squared(
    model: nn.Module, matrices: Mapping[str, nn.Parameter], beside: Sequence[nn.Parameter] = ()
) -> Iterator[dict[str, torch.Tensor]]:
    """Sums (float32), to which every backward in the block adds the squares of the gradients of `matrices`.

    What is computed from the parameters `beside` needs gradients too.
    """
    sums = {name: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for name, p in matrices.items()}

    def add(name: str, p: nn.Parameter) -> None:
        assert p.grad is not None
        sums[name].addcmul_(p.grad.float(), p.grad.float())
        p.grad = None

    with _only(list(model.parameters()), [*matrices.values(), *beside]), torch.enable_grad():
        handles = [p.register_post_accumulate_grad_hook(partial(add, name)) for name, p in matrices.items()]
        try:
            yield sums
        finally:
            for handle in handles:
                handle.remove()


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
