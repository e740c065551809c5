"""What was tried for every gap, what was taken, and whether it pays on text that no map has seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import Comparison, compare
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

NONE = "none"


@dataclass(frozen=True)
class Gap:
    """What was tried for the gap between the layers `layer` and `stop`: (form, ridge, held-out loss in nats a token).

    The first is of no map at all; `chosen` is the place of the smallest. The gaps behind it were not mended yet, and
    the maps are those of the first fit, without the windows that chose.
    """

    layer: int
    stop: int
    module: str
    forms: tuple[str, ...]
    ridges: np.ndarray
    losses: np.ndarray
    chosen: int


@dataclass(frozen=True)
class Judgement:
    """The mean loss of every window of a text (nats a token) of the cut model and of the mended one."""

    cut: np.ndarray
    mended: np.ndarray
    measured_on: MeasuredOn

    @property
    def comparison(self) -> Comparison:
        return compare(self.cut, self.mended)

    def told(self) -> str:
        """One line: what mending does to the perplexity of this text."""
        return f"Mending: {self.comparison.told()} of {self.measured_on.text} ({self.measured_on.split})"


def pays(check: Comparison, other: Comparison) -> bool:
    """Whether maps are kept: they pay on windows of their own text that they were not fitted to, and help elsewhere.

    A map that fits its text alone lowers the loss of `check` and not that of `other`, which is another text.
    """
    return check.pays and other.change < 0


@dataclass(frozen=True)
class MendReport(Result):
    """How the gaps of a removal were mended: `fitted` tokens made the maps that `held_out` others chose among.

    What was taken was fitted again on all of them. `check` and `other` judge the result by windows of the same text
    that had no part in it and by another text; both are None for maps that nothing has judged.
    """

    gaps: tuple[Gap, ...]
    fitted: int
    held_out: int
    measured_on: MeasuredOn
    check: Judgement | None = None
    other: Judgement | None = None

    def __post_init__(self) -> None:
        for gap in self.gaps:
            if not (len(gap.forms) == len(gap.ridges) == len(gap.losses) > gap.chosen >= 0):
                raise LyapunovPruneError("a mended gap names other numbers of forms, ridges and losses; measure again")

    @property
    def kept(self) -> bool:
        """Whether the maps were taken: what has judged them says that they pay."""
        return self.check is None or self.other is None or pays(self.check.comparison, self.other.comparison)

    @property
    def judgements(self) -> tuple[Judgement, ...]:
        return tuple(each for each in (self.check, self.other) if each is not None)

    def to_frame(self) -> pd.DataFrame:
        """One row a gap: the form that was taken, and the held-out loss without a map and with it."""
        rows = [
            (g.layer, g.stop, g.module, g.forms[g.chosen], g.ridges[g.chosen], g.losses[0], g.losses[g.chosen])
            for g in self.gaps
        ]
        columns = ["layer before", "layer behind", "module", "map", "ridge", "loss without", "loss with"]
        return pd.DataFrame(rows, columns=columns)

    def sentence(self) -> str:
        if not self.kept:
            return "not mended, as it does not pay"
        mended = sum(gap.chosen > 0 for gap in self.gaps)
        tokens = self.fitted + self.held_out
        return (
            f"{mended} of {len(self.gaps)} gaps mended on {tokens} tokens, forms and ridges chosen by {self.held_out}"
        )

    def headline(self) -> str:
        return "\n".join([self.sentence(), *(each.told() for each in self.judgements)])
