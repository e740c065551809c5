"""The result: what a size was spent on, and what it lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lyapunov_prune.evaluation.judging import Comparison, compare
from lyapunov_prune.evaluation.perplexity import ratio_of
from lyapunov_prune.evaluation.sizes import SizesTried
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.worth import Ratio

REPORT = "size.json"


_PerMatrix = Annotated[np.ndarray, Per("matrix")]


_PerSize = Annotated[np.ndarray, Per("size")]


@dataclass(frozen=True)
class Frontier(Result):
    """Predicted KL by size: the cheapest types for every matrix, `best`, beside one type for all, `alike`.

    A size is the `bytes` of all matrices in one of `types`, a matrix whose rows are no whole blocks of it in the next
    wider type that they are blocks of. `bits` is the mean over the weights; both costs are in nats a token.
    """

    types: Annotated[tuple[str, ...], Per("size")]
    bytes: _PerSize
    bits: _PerSize
    alike: _PerSize
    best: _PerSize

    def answer(self) -> list[str]:
        return ["Predicted KL, nats a token: every matrix in one type, and the best types in as many bytes"]

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "type": self.types,
                "bits": self.bits,
                "MB": self.bytes / 1e6,
                "one type": self.alike,
                "best types": self.best,
            }
        )


@dataclass(frozen=True)
class Spent(Result):
    """A model of a size: the type of every matrix, and KL(dense ‖ rounded) in nats a token, predicted and measured.

    `types`, `bytes` and `cost` (nats a token) are by matrix, `cost` the predicted part of each. `kl` (windows,) is
    measured on `judged_on`, a text that neither the costs nor the importances used; those are of `measured_on`. There
    `loss` (windows,) is by how much the loss rose, nats a token. `alone` names the matrices whose costs were measured
    one at a time, since the prediction was off; with `as_they_are` none was, since the model was read from files.
    `tried` are the sizes of which this one was taken, where none was asked for. `fed` is the KL with feedback
    (`feedback.fed_forward`) over that without, on the text that decides: below 1 the file is written with it; None if
    it changes nothing or is impossible. `bits` is the mean over the weights of all matrices, `size` the bytes of all
    tensors.
    """

    wanted: str
    names: Annotated[tuple[str, ...], Per("matrix")]
    types: tuple[str, ...]
    bytes: _PerMatrix
    cost: _PerMatrix
    bits: float
    size: int
    kl: np.ndarray
    loss: np.ndarray
    alone: tuple[str, ...]
    frontier: Frontier
    measured_on: MeasuredOn
    judged_on: MeasuredOn
    rounded_before: bool
    tried: SizesTried | None = None
    as_they_are: bool = False
    fed: float | None = None

    @property
    def predicted(self) -> float:
        """KL in nats a token: the sum of the matrices' costs, to second order, times `fed` if that is below 1."""
        return float(self.cost.sum()) * min(1.0, self.fed or 1.0)

    @property
    def measured(self) -> Comparison:
        """The mean KL over windows, as `change`, with its interval."""
        return compare(np.zeros_like(self.kl), self.kl)

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            {"matrix": self.names, "type": self.types, "MB": self.bytes / 1e6, "predicted KL": self.cost}
        )

    def summary(self) -> pd.DataFrame:
        """By type, the most bytes first."""
        by = self.to_frame().groupby("type")
        groups = pd.concat([by.size().rename("matrices"), by[["MB", "predicted KL"]].sum()], axis=1)
        return groups.sort_values("MB", ascending=False).reset_index()

    def further(self) -> list[Result]:
        return [self.frontier] if self.tried is None else [self.tried, self.frontier]

    def against_dense(self) -> Ratio:
        return ratio_of(self.loss)

    def answer(self) -> list[str]:
        found = self.measured
        lines = [
            f"{self.measured_on.model.name} in {self.size / 1e6:.4g} MB of tensors ({self.wanted}), "
            f"{self.bits:.3g} bits a weight of the matrices",
            f"KL {found.change:.3g} nats a token ({found.low:.3g} to {found.high:.3g}) on {self.judged_on.tokens} "
            f"tokens of {self.judged_on.text}; {self.predicted:.3g} predicted",
        ]
        if self.as_they_are:
            lines.append(
                "The prediction was more than 15 % off, and the types stayed: the costs of single matrices are "
                "measured of a model in memory only"
            )
        if self.alone:
            lines.append(
                f"The first prediction was more than 15 % off: the costs of {len(self.alone)} matrices were measured, "
                "one at a time, and the types chosen again"
            )
        if self.fed is not None:
            kept = "" if self.fed < 1 else "; left out"
            lines.append(f"Feedback, by which later columns make up for earlier ones: KL × {self.fed:.3g}{kept}")
        if (half := np.flatnonzero(self.frontier.best <= self.cost.sum() / 2)).size:
            rows, at = self.frontier, half[self.frontier.bytes[half].argmin()]
            lines.append(
                f"{rows.bits[at]:.3g} bits a weight ({rows.bytes[at] / 1e6:.4g} MB of matrices) would lose half of "
                "that or less"
            )
        if self.rounded_before and (again := int(np.count_nonzero(self.cost))):
            lines.append(
                f"{again} of {len(self.names)} matrices were quantised before and are rounded twice; a dense original "
                "would lose less"
            )
        return lines
