"""What was tried and chosen for every gap, and whether it pays on text that was not used for fitting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lyapunov_prune.evaluation.judging import Comparison, Judgement
from lyapunov_prune.results.arrays import require_fitting
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

NONE = "none"


@dataclass(frozen=True)
class Gap:
    """The candidates for the gap between the layers `layer` and `stop`: (form, ridge, held-out loss in nats per token).

    The first candidate is no map; `chosen` is the index of the smallest loss. Later gaps were not mended yet, and the
    maps are those of the first fit, without the held-out windows.
    """

    layer: int
    stop: int
    module: str
    forms: tuple[str, ...]
    ridges: np.ndarray
    losses: np.ndarray
    chosen: int


def pays(check: Comparison, other: Comparison) -> bool:
    """Whether maps are kept: they pay on held-out windows of their own text, and do not harm another text.

    Both intervals decide: that of `check` lies below zero, and that of `other` not above it, as it would for a map that
    fits only its own text.
    """
    return check.pays and other.has_power and not other.harms


@dataclass(frozen=True)
class MendReport(Result):
    """How the gaps of a removal were mended: maps fitted on `fitted` tokens and chosen on `held_out` others.

    The chosen maps were fitted again on all of them. `check` (unused windows of the same text) and `other` (another
    text) judge the result; both are None for maps that were not judged. `gaps` is empty if channels were removed: then
    the last matrix of every feed-forward block was refitted.
    """

    gaps: tuple[Gap, ...]
    fitted: int
    held_out: int
    measured_on: MeasuredOn
    check: Judgement | None = None
    other: Judgement | None = None

    def __post_init__(self) -> None:
        for gap in self.gaps:
            fits = len(gap.forms) == len(gap.ridges) == len(gap.losses) > gap.chosen >= 0
            require_fitting(fits, "a mended gap names other numbers of forms, ridges and losses")

    @property
    def kept(self) -> bool:
        """Whether the maps were kept, that is whether both judgements say that they pay."""
        return self.check is None or self.other is None or pays(self.check.comparison, self.other.comparison)

    @property
    def judgements(self) -> tuple[Judgement, ...]:
        return tuple(each for each in (self.check, self.other) if each is not None)

    @property
    def texts(self) -> tuple[MeasuredOn, ...]:
        """The windows that fitted, and those that judged."""
        return (self.measured_on, *(each.measured_on for each in self.judgements))

    def to_frame(self) -> pd.DataFrame:
        """One row per gap: the chosen form, and the held-out loss without and with the map."""
        rows = [
            (g.layer, g.stop, g.module, g.forms[g.chosen], g.ridges[g.chosen], g.losses[0], g.losses[g.chosen])
            for g in self.gaps
        ]
        columns = ["layer before", "layer behind", "module", "map", "ridge", "loss without", "loss with"]
        return pd.DataFrame(rows, columns=columns)

    def sentence(self) -> str:
        if not self.kept:
            return f"{'not mended' if self.gaps else 'not refitted'}, as it does not help{self.lost()}"
        if not self.gaps:
            return f"the last matrix of every block refitted on {self.fitted} tokens"
        mended = sum(gap.chosen > 0 for gap in self.gaps)
        tokens = self.fitted + self.held_out
        return (
            f"{mended} of {len(self.gaps)} gaps mended on {tokens} tokens, forms and ridges chosen by {self.held_out}"
        )

    def lost(self) -> str:
        """The text that decided against the maps; empty if they were kept."""
        if self.kept:
            return ""
        assert self.check is not None
        assert self.other is not None
        if not self.check.comparison.pays:
            return f": no gain shown on {self.check.measured_on.text}"
        return f": worse on {self.other.measured_on.text}"

    def headline(self) -> str:
        return "\n".join([self.sentence(), *(f"Mending: {each.told()}" for each in self.judgements)])
