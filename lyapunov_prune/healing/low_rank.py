"""Low-rank updates of a model's matrices: trained beside the weights, merged at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift, widen
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.plain import require_parameters, require_weights
from lyapunov_prune.models.projections import Projection, structure_projections
from lyapunov_prune.models.structure import find_layers

_ENTRIES = 2**20  # entries merged at a time: whole float64 matrices would fragment memory


@contextmanager
def low_rank_updates(model: PreTrainedModel, rank: int, seed: int = 0) -> Iterator[dict[str, nn.Parameter]]:
    """Run `model` with `W + B A` in place of every matrix of its layers, and yield the factors by name.

    `W` is m × n, `B` (m × rank) is initialised to zero and `A` (rank × n) to N(0, 1/n), so nothing changes before the
    first step (Hu et al., LoRA, ICLR 2022, §4.1, with scale α/r = 1). Factors are float32 or wider for any dtype of the
    weights, and their product is added to a matrix's output before that is rounded. At the end of the block the product
    is added to the weight, in float64 and rounded once: the model is a plain one again, with new parameter tensors
    (other references to the old tensors keep the old numbers). After an exception the weights are unchanged.

    Each matrix stacked in a bare parameter (experts) has factors of its own, stacked like the weights. The updated
    weights are formed before every forward of the module, in its dtype, which takes the memory of a layer's experts
    once more.

    A weight that several modules share gets one update. Raises LyapunovPruneError for a rank below 1 or above that of a
    matrix.
    """
    weights: dict[nn.Parameter, tuple[str, Projection]] = {}  # each shared weight once, under its first name
    users: dict[nn.Parameter, list[tuple[nn.Module, Projection]]] = {}
    require_weights(model, "unadapted")
    structure = find_layers(model)
    require_parameters(structure)
    for p in structure_projections(structure):
        module, name = model.get_submodule(p.module), p.module
        if p.parameter != "weight":
            name += f".{p.parameter}"
        weight = module._parameters[p.parameter]
        assert weight is not None
        least = min(_stacked(weight, p).shape[-2:])
        if not 1 <= rank <= least:
            raise LyapunovPruneError(f"rank {rank} for {name}, which has {least}; give 1 to that")
        weights.setdefault(weight, (name, p))
        if all(user is not module for user, _ in users.setdefault(weight, [])):  # parts and experts are in one module
            users[weight].append((module, p))

    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, nn.Parameter] = {}
    with ExitStack() as stack:
        for weight, (name, p) in weights.items():
            shape = _stacked(weight, p).shape
            *several, m, n = (*shape[:-2], shape[-1], shape[-2]) if p.transposed else shape
            wide = widen(weight.detach()[:0])
            A = nn.Parameter((torch.randn(*several, rank, n, generator=generator) / n**0.5).to(wide))
            B = nn.Parameter(torch.zeros(*several, m, rank).to(wide))
            factors |= {f"{name}.A": A, f"{name}.B": B}
            for module, user in users[weight]:
                if user.stack:
                    runs = model.get_submodule(user.routed or user.module)
                    stack.enter_context(_updated(runs, module, user, weight, A, B))
                else:
                    stack.enter_context(hooked(after=[(module, partial(_add, A, B))]))
        yield factors
    for weight, (name, p) in weights.items():
        left, right = (lift(factors[f"{name}.{side}"].detach()) for side in "BA")
        if p.transposed:
            left, right = right.mT, left.mT
        merged = torch.empty_like(weight.data)
        stacked = (_stacked(merged, p), _stacked(weight.data, p), left, right)
        every = (t if t.ndim == 3 else t[None] for t in stacked)
        for new, old, L, R in zip(*every, strict=True):
            rows = max(1, _ENTRIES // new.shape[1])
            for some, before, part in zip(new.split(rows), old.split(rows), L.split(rows), strict=True):
                some.copy_(lift(before) + part @ R)
        weight.data = merged


def _stacked(weight: torch.Tensor, p: Projection) -> torch.Tensor:
    """A view of the weight; if it stacks several matrices, they have an axis of their own."""
    return weight.unflatten(0, (p.stack, -1)) if p.stack > 1 and weight.ndim == 2 else weight


@contextmanager
def _updated(
    runs: nn.Module, module: nn.Module, p: Projection, weight: nn.Parameter, A: nn.Parameter, B: nn.Parameter
) -> Iterator[None]:
    """During every forward of `runs`, the parameter of `module` is `weight` plus the product of the factors."""

    def put(*_: Any) -> None:
        update = (A.mT @ B.mT if p.transposed else B @ A).view(weight.shape)
        module._parameters[p.parameter] = (widen(weight) + update).to(weight.dtype)  # type: ignore[assignment]

    def restore(*_: Any) -> None:
        module._parameters[p.parameter] = weight

    try:
        with hooked(before=[(runs, put)], after=[(runs, restore)]):
            yield
    finally:
        restore()  # in case a forward raised


def _add(A: torch.Tensor, B: torch.Tensor, module: nn.Module, args: Any, kwargs: Any, output: Any) -> torch.Tensor:
    """The output of a matrix plus that of `B A` on the same input."""
    return (widen(output) + linear(linear(args[0].to(A.dtype), A), B)).to(output.dtype)
