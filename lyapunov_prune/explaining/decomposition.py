"""The error after every layer as a sum: what arrived, what the layer added, and what it did to what arrived."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lyapunov_prune.linalg import lift

PARTS = ("inherited", "added", "amplified")


class Decomposed:
    """The error after N layers as a sum, from sums over tokens, float64, which are its fields.

    With the states `h_k` and `h'_k` of the dense and the compressed model before layer k, their layers `f_k` and `g_k`
    (a removed layer passes on its input), and `e_k = h'_k − h_k`, exactly

    `e_{k+1} = e_k + (g(h) − f(h)) + ((g(h') − g(h)) − e_k)`: inherited, added, amplified or damped.

    `size` and `error` (N + 1,) are `Σ_t ‖h_k‖²` and `Σ_t ‖e_k‖²`; `energy` (3, N) is the same for the three parts,
    `along` (3, N) is `Σ_t ⟨part, e_{k+1}⟩`; `passed` (N,) is `Σ_t ‖g(h') − g(h)‖²`; `off` (N,) is the distance of the
    sum of the parts from `e_{k+1}`, divided by `√Σ_t ‖h_{k+1}‖²`, and `rounding` how much of it rounding can explain.
    """

    size: np.ndarray
    error: np.ndarray
    along: np.ndarray
    off: np.ndarray
    rounding: float

    @property
    def adds_up(self) -> bool:
        """Whether the three parts of every step add up to the error that leaves it, up to rounding."""
        return bool((self.off <= self.rounding).all())

    @property
    def relative(self) -> np.ndarray:
        """`‖e_k‖ / ‖h_k‖` at every boundary, (N + 1,)."""
        return np.sqrt(self.error / self.size)

    @property
    def parts(self) -> np.ndarray:
        """Contributions of inherited, added and amplified to `‖e_{k+1}‖ / ‖h_{k+1}‖`, which is their sum: (3, N)."""
        leaving = np.sqrt(self.error[1:] * self.size[1:])
        return np.divide(self.along, leaving, out=np.zeros_like(self.along), where=leaving > 0)

    @property
    def carried(self) -> np.ndarray:
        """By how much each step increases (or decreases) the relative error that arrives, (N,).

        `r_N = r_0 + Σ_k (added_k + carried_k)` with `r` the `relative` error.
        """
        inherited, _, amplified = self.parts
        return inherited + amplified - self.relative[:-1]


class ErrorSums:
    """The sums of `Decomposed`, but `off` is the squared distance of the sum of the parts from `e_{k+1}`.

    The states come from whole forwards and the parts from layers that ran alone, so `off` is zero up to rounding, and
    large if a layer that runs alone computes something else than in its model.
    """

    def __init__(self, layers: int) -> None:
        self.size, self.error = np.zeros((2, layers + 1))
        self.passed, self.off = np.zeros((2, layers))
        self.energy, self.along = np.zeros((2, 3, layers))

    def add_states(self, dense: Sequence[torch.Tensor], compressed: Sequence[torch.Tensor]) -> None:
        """Add the states at all boundaries of a batch of windows."""
        for boundary, (h, changed) in enumerate(zip(dense, compressed, strict=True)):
            self.size[boundary] += _energy(lift(h))
            self.error[boundary] += _energy(_minus(changed, h))

    def add_layer(
        self,
        layer: int,
        error: Sequence[torch.Tensor],
        dense: torch.Tensor,
        compressed: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Add one layer: `error` is `(e_k, e_{k+1})`, float64, `dense` is `f(h)`, `compressed` is `(g(h), g(h'))`."""
        arriving, leaving = error
        of_dense, of_compressed = compressed
        passed = _minus(of_compressed, of_dense)
        parts = arriving, _minus(of_dense, dense), passed - arriving
        self.passed[layer] += _energy(passed)
        self.off[layer] += _energy(leaving - parts[0] - parts[1] - parts[2])
        for number, part in enumerate(parts):
            self.energy[number, layer] += _energy(part)
            self.along[number, layer] += float((part * leaving).sum())


def difference(changed: Sequence[torch.Tensor], dense: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`h'_k − h_k` at every boundary, float64."""
    return [_minus(a, b) for a, b in zip(changed, dense, strict=True)]


def _minus(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return lift(a).to(b.device) - lift(b)


def _energy(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x).square())
