"""How far a representation moved: linear CKA between two sets of states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import torch

from lyapunov_prune.linalg import lift


class Reference:
    """The states to compare with: one tensor (… × d) per batch of windows, any float dtype.

    `add` adds a sum over the processes that share the windows, in place.
    """

    def __init__(
        self, states: Sequence[torch.Tensor], add: Callable[[torch.Tensor], None] = lambda total: None
    ) -> None:
        self.states, self.add = [s.flatten(0, -2) for s in states], add
        self.tokens = self._sum(torch.tensor(len(x), dtype=torch.float64) for x in self.states).item()
        self.mean = self._sum(lift(x).sum(0) for x in self.states) / self.tokens
        self.size = _norm(self._sum(self._centred(x).T @ self._centred(x) for x in self.states))

    def drift(self, states: Sequence[torch.Tensor]) -> float:
        """`1 − CKA` with `CKA = ‖XᵀY‖_F² / (‖XᵀX‖_F ‖YᵀY‖_F)` of centred X (the reference) and Y (tokens × d).

        Kornblith et al., Similarity of neural network representations revisited (ICML 2019), eq. 5, linear kernel.
        Float64. 0 for equal, rotated and scaled states; NaN when a state is not finite.
        """
        flat = [lift(s.flatten(0, -2)) for s in states]
        # Y is centred at the end by its sums; the cross term needs no correction, because X is centred.
        cross = self._sum(self._centred(x).T @ y for x, y in zip(self.states, flat, strict=True))
        mean = self._sum(y.sum(0) for y in flat) / self.tokens
        own = self._sum(y.T @ y for y in flat) - self.tokens * torch.outer(mean, mean)
        size = self.size * _norm(own)
        return 1 - _norm(cross) ** 2 / size if size != 0 else float("nan")

    def _centred(self, x: torch.Tensor) -> torch.Tensor:
        return lift(x) - self.mean

    def _sum(self, terms: Iterable[torch.Tensor]) -> torch.Tensor:
        total = reduce(torch.add, terms)
        self.add(total)
        return total


def _norm(A: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(A))
