"""Criterion `from-end`: remove the last layers first; a control."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.lazy import np
from lyapunov_prune.ranking.criterion import ByPosition


class FromEnd(ByPosition):
    """The distance from the end."""

    help = "the last layers first"
    reference = "control"
    needs = ("layer",)

    def score(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        return (len(values["layer"]) - 1.0) - values["layer"]
