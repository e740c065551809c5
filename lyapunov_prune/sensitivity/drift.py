"""How far a representation moved: linear CKA between two sets of states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import torch

from lyapunov_prune.linalg import lift


class Reference:
    """The states to compare with: one tensor (… × d) per batch of windows, any float dtype."""

    def __init__(self, states: Sequence[torch.Tensor]) -> None:
        self.states = [s.flatten(0, -2) for s in states]
        self.tokens = sum(map(len, self.states))
        self.mean = _sum(lift(x).sum(0) for x in self.states) / self.tokens
        self.size = _norm(_sum(self._centred(x).T @ self._centred(x) for x in self.states))

    def drift(self, states: Sequence[torch.Tensor]) -> float:
        """`1 − CKA` with `CKA = ‖XᵀY‖_F² / (‖XᵀX‖_F ‖YᵀY‖_F)` of centred X (the reference) and Y (tokens × d).

        Kornblith et al., Similarity of neural network representations revisited (ICML 2019), eq. 5, linear kernel.
        Float64. 0 for equal, rotated and scaled states; NaN when a state is not finite.
        """
        flat = [lift(s.flatten(0, -2)) for s in states]
        # Y is centred at the end by its sums; the cross term needs no correction, because X is centred.
        cross = _sum(self._centred(x).T @ y for x, y in zip(self.states, flat, strict=True))
        mean = _sum(y.sum(0) for y in flat) / self.tokens
        own = _sum(y.T @ y for y in flat) - self.tokens * torch.outer(mean, mean)
        size = self.size * _norm(own)
        return 1 - _norm(cross) ** 2 / size if size != 0 else float("nan")

    def _centred(self, x: torch.Tensor) -> torch.Tensor:
        return lift(x) - self.mean


def _sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, tensors)


def _norm(A: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(A))
