"""Low-rank updates of a model's matrices: trained beside the weights, merged at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift, widen
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.plain import require_no_adapters
from lyapunov_prune.models.projections import structure_projections
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

    A weight that several modules share gets one update. Raises LyapunovPruneError for a rank below 1 or above that of a
    matrix, and for experts stored as one 3-D parameter.
    """
    weights: dict[nn.Parameter, tuple[str, bool]] = {}  # a shared weight once, under its first name
    users: dict[nn.Parameter, list[nn.Module]] = {}
    require_no_adapters(model)
    for p in structure_projections(find_layers(model)):
        if p.expert is not None:
            raise LyapunovPruneError(
                f"{p.name} is one of several experts in one parameter, which takes no low-rank update; heal all "
                "parameters (no rank)"
            )
        module = model.get_submodule(p.module)
        weight = module._parameters["weight"]
        assert weight is not None
        if not 1 <= rank <= min(weight.shape):
            raise LyapunovPruneError(f"rank {rank} for {p.module}, which has {min(weight.shape)}; give 1 to that")
        weights.setdefault(weight, (p.module, p.transposed))
        if module not in users.setdefault(weight, []):  # parts of a fused matrix are in one module
            users[weight].append(module)

    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, nn.Parameter] = {}
    adding: list[tuple[nn.Module, Callable[..., torch.Tensor]]] = []
    for weight, (name, transposed) in weights.items():
        m, n = weight.shape[::-1] if transposed else weight.shape
        wide = widen(weight.detach()[:0])
        A = nn.Parameter((torch.randn(rank, n, generator=generator) / n**0.5).to(wide))
        B = nn.Parameter(torch.zeros(m, rank).to(wide))
        factors |= {f"{name}.A": A, f"{name}.B": B}
        adding += [(module, _adding(A, B)) for module in users[weight]]
    with hooked(after=adding):
        yield factors
    for weight, (name, transposed) in weights.items():
        left, right = (lift(factors[f"{name}.{side}"].detach()) for side in "BA")
        if transposed:
            left, right = right.T, left.T
        merged, rows = torch.empty_like(weight.data), max(1, _ENTRIES // weight.shape[1])
        for new, old, part in zip(merged.split(rows), weight.data.split(rows), left.split(rows), strict=True):
            new.copy_(lift(old) + part @ right)
        weight.data = merged


def _adding(A: torch.Tensor, B: torch.Tensor) -> Callable[..., torch.Tensor]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        return (widen(output) + linear(linear(args[0].to(A.dtype), A), B)).to(output.dtype)

    return hook
