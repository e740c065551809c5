"""Criterion `rho`: first remove the layer whose growth of an error is nearest to one."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.lazy import np
from lyapunov_prune.ranking.criterion import ByProfile


class Rho(ByProfile):
    """`|ρ_l − 1|`, where ρ_l is the growth of an error through layer l under the pooling of the profile."""

    help = "|rho - 1|: how far the growth of an error is from 1"
    reference = "structural sensitivity, §6.5"
    needs = ("rho",)

    def score(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        return abs(values["rho"] - 1)
