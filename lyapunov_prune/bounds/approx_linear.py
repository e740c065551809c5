"""ApproxLinear: a projection that runs its approximation and records the error against its bound.

The error is `‖W x − Ŵ x'‖ = ‖E x' + W (x − x')‖` with `E = W − Ŵ`, so one product with the residual is enough, and one
more for the tokens that the cache answered. It is computed in float32 (float64 for float64 models), and its rounding is
at most `γ_{n+k} ‖E‖_F ‖x'‖`, which is the margin. The rounding of `Ŵ x'` in the model's own dtype is not part of the
approximation and is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from lyapunov_prune.bounds.approximation import Approximation
from lyapunov_prune.bounds.bound_check import BoundCheck, Seen
from lyapunov_prune.bounds.checkers import (
    composition_bound,
    interpolation_bound,
    retrieval_bound,
    sparse_activation_bound,
)
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift, token_energy, widen
from lyapunov_prune.models.projections import Projection

# Largest loss to underflow of a float32 product or entry.
_TINIEST = 2.0**-148


def frobenius(A: torch.Tensor) -> float:
    """`‖A‖_F`, with squares summed in float64."""
    return float(torch.linalg.vector_norm(A if A.device.type != "mps" else A.cpu(), dtype=torch.float64))


@dataclass
class Record(Seen):
    """Errors and bounds of one approximated matrix so far."""

    projection: Projection
    approximation: Approximation
    energy: float = 0.0  # Σ ‖error‖² over all inputs
    output: float = 0.0  # Σ ‖W x‖², recorded only while the exact model runs (`observe`)
    ratios: list[np.ndarray] = field(repr=False, default_factory=list)  # error / bound where the bound is above zero
    # The residual and W as installed (W only with a cache), and the relative rounding of their entries.
    residual: torch.Tensor = field(repr=False, default_factory=lambda: torch.zeros(0))
    exact: torch.Tensor | None = field(repr=False, default=None)
    unit: float = 2.0**-24
    residual_size: float = 0.0  # Frobenius norms of the two, for the margins
    exact_size: float = 0.0

    def take_probes(self) -> None:
        """Apply the installed matrices to their approximate top right singular vectors.

        Text rarely comes near a bound, so a residual that is slightly too large could go unnoticed; these vectors
        attain it.
        """
        p, a = self.projection, self.approximation
        error, size, rounding = self._stretch(self.residual, self.residual_size, a.direction)
        named: dict[str, Any] = {"rounding": rounding, "matrix": p.name, "layer": p.layer}
        self.probe = sparse_activation_bound(error, size, a.total_norm, **named)
        if self.exact is not None:
            error, size, rounding = self._stretch(self.exact, self.exact_size, a.weight_direction)
            self.weight_probe = retrieval_bound(error, size, a.weight_norm, **(named | {"rounding": rounding}))

    def _stretch(self, A: torch.Tensor, frobenius: float, x: torch.Tensor) -> tuple[float, float, float]:
        """`‖A x‖`, `‖x‖` and the rounding error of the former, float64. A has been rounded to the dtype it runs in."""
        error = float(torch.linalg.vector_norm(A.cpu().double() @ x))
        rounding = frobenius * (self.unit + 2.0**-40) + _TINIEST * A.numel() ** 0.5
        return error, float(torch.linalg.vector_norm(x)) * (1 + 2.0**-40), rounding


class Residuals:
    """The residual `W − Ŵ` of a matrix with approximated parts (`records`), and `W` if there is a cache."""

    def __init__(self, W: torch.Tensor, approximated: torch.Tensor, records: Sequence[Record], cached: bool) -> None:
        self.records = records
        self.residual = widen(W) - widen(approximated)  # rounded once; the margin includes it
        self.exact = widen(W) if cached else None
        self._unit = torch.finfo(self.residual.dtype).eps
        for record in records:
            rows = slice(record.projection.start, record.projection.stop)
            record.unit = self._unit
            record.residual = self.residual[rows]
            record.residual_size = frobenius(record.residual)
            if self.exact is not None:
                record.exact = self.exact[rows]
                record.exact_size = frobenius(record.exact)

    @torch.no_grad()
    def account(
        self,
        x: torch.Tensor,
        used: torch.Tensor,
        distance: torch.Tensor | None = None,
        radius: torch.Tensor | None = None,
    ) -> None:
        """Record error and bound of every input `x` (windows × tokens × n); `_look_up` returns the other arguments."""
        if not _full_products():
            raise LyapunovPruneError(
                "bounds are checked with full float32 products; set matmul precision to highest "
                "(torch.set_float32_matmul_precision)"
            )
        with torch.autocast(x.device.type, enabled=False):
            error = linear(widen(used), self.residual)
            size = token_energy(used).sqrt()
            hit = None
            if distance is not None:
                hit = distance > 0
                error[hit] += linear(widen(x[hit]) - widen(used[hit]), self.exact)  # type: ignore[arg-type]
        steps = self._unit * (x.shape[-1] + 16)
        underflow = _TINIEST * x.shape[-1] * (1 + float(size.max())) * self.residual.shape[0] ** 0.5
        for record in self.records:
            p, a = record.projection, record.approximation
            rows = slice(p.start, p.stop)
            squares = token_energy(error[..., rows])
            record.energy += float(squares.sum())
            e = squares.sqrt()
            rounding = underflow + steps * record.residual_size * size
            if hit is not None and distance is not None:
                rounding = rounding + steps * record.exact_size * distance
                record.hits += int(hit.sum())
            numbers = [_flat(v) for v in (e, size, radius, rounding)]
            record.check = _theorem(a, p, *numbers).with_more(record.check)
            record.ratios.append(_ratios(a, *numbers[:3]))


class ApproxLinear:
    """Replaces the `forward` of one projection module; the module itself is not replaced.

    `records` are the approximated parts of the module's matrix; other parts keep their weights. `parameter` is the
    whole matrix as the module stores it, for callers that multiply by it directly. `radius` is the cache radius
    relative to the norm of the input: token t is answered with the input of the earliest token s ≤ t of its window for
    which `‖x_t − x_s‖ ≤ radius ‖x_t‖`.
    """

    def __init__(self, module: nn.Module, records: Sequence[Record], radius: float) -> None:
        stored = module.weight.detach()  # type: ignore[operator]
        W = stored.T if records[0].projection.transposed else stored
        self.radius, self.module = radius, module
        self.weight = records[0].approximation.weight.to(W)
        if len(self.weight) < len(W):  # a part of a fused matrix
            self.weight = W.clone()
            for record in records:
                self.weight[record.projection.start : record.projection.stop] = record.approximation.weight
        laid_out = self.weight.T if records[0].projection.transposed else self.weight
        self.parameter = nn.Parameter(laid_out, requires_grad=False)
        self.residuals = Residuals(W, self.weight, records, cached=radius > 0)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """`Ŵ x' + b` for an input (…, n), in the model's dtype, and records errors and bounds."""
        x = input.reshape(-1, *input.shape[-2:]) if input.ndim > 1 else input.view(1, 1, -1)
        used, distance, radius = (x, None, None) if self.radius == 0 else _look_up(x, self.radius)
        output = linear(used.view(input.shape), self.weight, self.module.bias)  # type: ignore[arg-type]
        self.residuals.account(x, used, distance, radius)
        return output


def _full_products() -> bool:
    """Whether float32 matrices are multiplied in full float32, by the older and the newer settings of torch."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the older setting cannot express a precision set by backend
        return False


def _flat(numbers: torch.Tensor | None) -> np.ndarray:
    return np.zeros(1) if numbers is None else numbers.cpu().numpy().ravel()


def _theorem(
    a: Approximation, p: Projection, error: np.ndarray, size: np.ndarray, radius: np.ndarray, rounding: np.ndarray
) -> BoundCheck:
    """The theorem for the stages in use."""
    named: dict[str, Any] = {"rounding": rounding, "matrix": p.name, "layer": p.layer}
    if not radius.any():
        if a.low_rank_norm == 0:
            return sparse_activation_bound(error, size, a.sparse_norm, **named)
        if a.sparse_norm == 0:
            return interpolation_bound(error, size, a.low_rank_norm, **named)
    elif a.total_norm == 0:
        return retrieval_bound(error, radius, a.weight_norm, **named)
    named |= {"weight_norm": a.weight_norm, "sparse_norm": a.sparse_norm, "low_rank_norm": a.low_rank_norm}
    return composition_bound(error, size, radius, **named)


def _ratios(a: Approximation, error: np.ndarray, size: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Error / bound of the inputs whose bound (that of the stages in use) is above zero."""
    bound = a.weight_norm * radius + (a.sparse_norm + a.low_rank_norm) * size
    return error[bound > 0] / bound[bound > 0]


def _look_up(x: torch.Tensor, relative: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cached inputs for a radius of `relative ‖x_t‖`: inputs, distances and radii, per window.

    An approximate distance only finds the candidate; the difference itself decides whether it lies within the radius.
    """
    wide = widen(x.detach())
    radius = relative * token_energy(wide).sqrt()
    near = (lift(torch.cdist(wide, wide)) <= radius.unsqueeze(-1)).to(x.device)
    near = (near | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)).tril()
    first = near.int().argmax(-1)  # the earliest match
    cached = x.gather(1, first.unsqueeze(-1).expand_as(x))
    distance = token_energy(wide - widen(cached.detach())).sqrt()
    within = distance <= radius * (1 - 2.0**-20)  # allows for rounding of the difference
    used = torch.where(within.unsqueeze(-1), cached, x)
    return used, torch.where(within, distance, 0), radius
