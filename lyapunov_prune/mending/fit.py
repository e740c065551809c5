"""The linear map that brings the output of a place closest to the missing state, from sums over tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lyapunov_prune.calibration.gram import damped, leading
from lyapunov_prune.linalg import lift

LOW_RANK = 8  # rank of a low-rank map: width / LOW_RANK


@dataclass(frozen=True, eq=False)
class LinearMap:
    """`m ↦ m + E m + b`, float64: `E` is width × width, or (width,) for a diagonal map.

    `shift` is b (width,), or None if no shift is possible.
    """

    E: torch.Tensor
    shift: torch.Tensor | None

    def __call__(self, m: torch.Tensor) -> torch.Tensor:
        """Apply the map to rows m (…, width) in float64, and round to the dtype of m."""
        wide = lift(m)
        changed = wide + (wide * self.E if self.E.ndim == 1 else wide @ self.E.T)
        return (changed if self.shift is None else changed + self.shift).to(m)


class Sums:
    """Weighted sums over tokens of the output m of a place and of the missing state r, sufficient for every fit."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.mm = torch.zeros(width, width, dtype=torch.float64, device=device)
        self.rm = torch.zeros_like(self.mm)
        self.m = torch.zeros_like(self.mm[0])
        self.r = torch.zeros_like(self.m)
        self.weight = torch.zeros_like(self.m[0])

    def add(self, m: torch.Tensor, r: torch.Tensor, weight: torch.Tensor) -> None:
        """Add tokens × width of m and r, float64; `weight` (tokens,) is the weight of each token."""
        w = weight.unsqueeze(-1)
        self.mm += (w * m).T @ m
        self.rm += (w * r).T @ m
        self.m += (w * m).sum(0)
        self.r += (w * r).sum(0)
        self.weight += weight.sum()

    def __add__(self, other: Sums) -> Sums:
        found = Sums(len(self.m), self.m.device)
        for each in (self, other):
            found.mm += each.mm
            found.rm += each.rm
            found.m += each.m
            found.r += each.r
            found.weight += each.weight
        return found

    def centred(self, shifts: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ w m mᵀ and Σ w r mᵀ, centred if the map may add a shift."""
        if not shifts:
            return self.mm, self.rm
        return self.mm - self.m.outer(self.m) / self.weight, self.rm - self.r.outer(self.m) / self.weight


def fit(form: str, sums: Sums, ridge: float, *, shifts: bool) -> LinearMap:
    """`argmin Σ_t w_t ‖E m_t + b − r_t‖² + λ ‖E‖_F²` over the maps of a form of FORMS, λ = ridge · mean diag Σ w m mᵀ.

    b is zero if no shift is possible. With a negligible ridge `full` is the least-squares map.
    """
    mm, rm = sums.centred(shifts)
    E = FORMS[form](mm, rm, ridge)
    shift = (sums.r - (E * sums.m if E.ndim == 1 else E @ sums.m)) / sums.weight if shifts else None
    return LinearMap(E, shift)


def _full(mm: torch.Tensor, rm: torch.Tensor, ridge: float) -> torch.Tensor:
    """`E = R (G + λ I)⁻¹`."""
    return torch.linalg.solve(damped(mm, ridge, mm.device), rm.T).T


def _low_rank(mm: torch.Tensor, rm: torch.Tensor, ridge: float) -> torch.Tensor:
    """The best map of rank width/8, by reduced-rank regression: the full map projected on its leading outputs."""
    E = _full(mm, rm, ridge)
    U = leading(E, damped(mm, ridge, mm.device), max(1, len(mm) // LOW_RANK))
    return U @ (U.T @ E)


def _channels(mm: torch.Tensor, rm: torch.Tensor, ridge: float) -> torch.Tensor:
    """`e_i = R_ii / (G_ii + λ)`."""
    return rm.diagonal() / damped(mm, ridge, mm.device).diagonal()


def _nothing(mm: torch.Tensor, rm: torch.Tensor, ridge: float) -> torch.Tensor:
    """E = 0: a shift alone."""
    return torch.zeros_like(mm.diagonal())


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "full": _full,
    "low rank": _low_rank,
    "channels": _channels,
    "shift": _nothing,
}
