"""The error of each of several compressed matrices on the inputs of the dense model, and its certified bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from lyapunov_prune.arguments import Count
from lyapunov_prune.bounds.approximate import Records
from lyapunov_prune.bounds.approximation import approximation
from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.forward.hooks import run_backbone
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.results.arrays import require_fitting
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import columns, pd
from lyapunov_prune.results.result import ROWS, Result


@dataclass(frozen=True)
class MatrixErrors(Result):
    """The errors of M compressed matrices, each measured alone on its inputs in the dense model.

    `error` (M,) is `√(Σ‖W x − W' x‖² / Σ‖W x‖²)` over all tokens, `norm` (M,) the certified `‖W − W'‖`. `checks` test
    `‖W x − W' x‖ ≤ ‖W − W'‖ ‖x‖` (Theorem 2, `sparse_activation_bound`) for the worst token of each matrix, and for a
    singular direction of `W − W'`, which attains the bound. A matrix without recorded inputs (an expert that no token
    reached) has an `error` of NaN and the second check alone.
    """

    names: Annotated[tuple[str, ...], Per("matrix")]
    layers: Annotated[tuple[int, ...], Per("matrix")]
    error: Annotated[np.ndarray, Per("matrix", finite=False)]
    norm: Annotated[np.ndarray, Per("matrix")]
    checks: Annotated[tuple[tuple[BoundCheck, ...], ...], Per("matrix")]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fitting(all(self.checks), "matrix errors: every matrix has a check")

    @property
    def violations(self) -> tuple[BoundCheck, ...]:
        return tuple(check for checks in self.checks for check in checks if not check.holds)

    def to_frame(self) -> pd.DataFrame:
        """One row per matrix; `ratio` is the largest error / bound of a token, `attained` that of the direction."""
        seen = ~np.isnan(self.error)
        return pd.DataFrame(
            {
                "matrix": self.names,
                "layer": self.layers,
                **columns(self, "error", "norm"),
                "ratio": [c[0].ratio if s else np.nan for c, s in zip(self.checks, seen, strict=True)],
                "attained": [checks[-1].ratio for checks in self.checks],
                "violations": [sum(not c.holds for c in checks) for checks in self.checks],
            }
        )

    def brief(self) -> pd.DataFrame:
        """The matrices with the largest errors, largest first."""
        return self.to_frame().sort_values("error", ascending=False).head(ROWS)

    def answer(self) -> list[str]:
        if self.violations:
            return [f"VIOLATION: {check}" for check in self.violations[:3]]
        held = "its certified bound held" if len(self.names) == 1 else f"all {len(self.names)} certified bounds held"
        if np.isnan(self.error).all():
            return [f"The matrices of the worst layers: {held}, each in one direction alone."]
        worst = int(np.nanargmax(self.error))
        return [
            f"Largest error of a matrix in the worst layers: {self.names[worst]}, {self.error[worst]:.3g} of its "
            f"output at the dense state; {held}."
        ]


def joined(found: Sequence[MatrixErrors]) -> MatrixErrors:
    """One result with the matrices of all of `found`."""
    return MatrixErrors(
        names=tuple(name for each in found for name in each.names),
        layers=tuple(layer for each in found for layer in each.layers),
        error=np.concatenate([each.error for each in found]),
        norm=np.concatenate([each.norm for each in found]),
        checks=tuple(checks for each in found for checks in each.checks),
    )


@torch.no_grad()
def measure_matrix_errors(
    reading: Reading, written: Mapping[Projection, torch.Tensor], batch_size: Count = 1
) -> MatrixErrors:
    """Measure `MatrixErrors` in one forward; `written` maps projections of the dense model to `W'` (output × input).

    `W'` is converted to the dtype of `W`. If the model is streamed, the caller keeps the layers of `written` in memory
    (`layer_held`). Raises LyapunovPruneError for another shape, NaN and infinities.
    """
    chosen = {p: approximation(p.weight(reading.model), W) for p, W in written.items()}
    with Records(reading.model, chosen).observing() as records:
        for ids in reading.windows(batch_size):
            run_backbone(reading.structure, ids)
    found = [records[p.name] for p in written]
    return MatrixErrors(
        names=tuple(p.name for p in written),
        layers=tuple(p.layer for p in written),
        error=np.sqrt([r.energy / r.output if r.output else np.nan for r in found]),
        norm=np.array([r.approximation.total_norm for r in found]),
        checks=tuple(r.checks for r in found),
    )
