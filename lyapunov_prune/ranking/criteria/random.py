"""Criterion `random`: remove layers in random order; a control."""

from __future__ import annotations

from lyapunov_prune.arguments import Seed
from lyapunov_prune.lazy import np
from lyapunov_prune.ranking.criterion import ByPosition


class ByLot(ByPosition):
    """A permutation drawn from `seed`."""

    seed: Seed = 0

    help = "random order"
    reference = "control"
    needs = ("lot",)

    def by_position(self, layer: np.ndarray) -> dict[str, np.ndarray]:
        return {"lot": np.random.default_rng(self.seed).permutation(len(layer)) + 0 * layer}  # NaN stays NaN
