"""Choose the layers to remove, and mend their gaps if that pays."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import Judgement
from lyapunov_prune.forward.reading import Readable, Reading
from lyapunov_prune.mending.judge import judged_mends
from lyapunov_prune.mending.mend import Mend, fit_mends
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.models.decoder import Model
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking.best import best_removal
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.shrinking.report import Taken

Mended = tuple[tuple[Mend, ...], MendReport]


@dataclass(frozen=True, eq=False)
class Chosen:
    """What to remove, and the maps that close the gaps; none if they do not pay."""

    plan: PruningPlan
    found: BestRemoval
    mends: tuple[Mend, ...]
    report: MendReport | None
    taken: tuple[Taken, ...]


@dataclass(frozen=True, eq=False)
class Chooser:
    """Chooses layers of the model of `reading` by criterion `best`, and mends on half of its windows.

    `judge` is the second text that judges mending. A search may spend `search` forwards. Without `mend` it compares no
    mended sets, and nothing is mended. Searches are kept in `folder`; what they measure on all layers is measured once.
    """

    reading: Reading
    judge: TokenBatch
    search: float | None
    mend: bool
    folder: Path | None
    batch_size: int

    def choose(self, remove: int) -> Chosen:
        began = time.monotonic()
        fits: dict[tuple[int, ...], Mended] = {}

        def fit(model: Model, removed: Sequence[int], batch: Readable, *, of: int = 1) -> Mended:
            fits[tuple(removed)] = fit_mends(model, removed, batch, of=of)
            return fits[tuple(removed)]

        found = best_removal(
            self.reading.decoder,
            self.reading,
            remove,
            search=self.search,
            mend=self.mend,
            judge=self.judge if self.mend else None,
            fit=fit,
            folder=self.folder,
            batch_size=self.batch_size,
        )
        plan = found.plan(remove)
        told = f"best of {len(found.tried)} sets by the loss"
        chosen = Taken("layers chosen", True, told, time.monotonic() - began)
        if not self.mend:
            return Chosen(plan, found, (), None, (chosen, Taken("mending", False, "no time left", 0.0)))
        fitted = fits.get(found.remove)
        judged = None if fitted is None else (fitted[0], _judged(found, fitted[1]))
        return self._mended(plan, found, chosen, judged)

    def _mended(self, plan: PruningPlan, found: BestRemoval, chosen: Taken, judged: Mended | None) -> Chosen:
        """The layers of `plan` with the maps that pay; `judged` are maps that a search has fitted and judged."""
        began = time.monotonic()
        try:
            if judged is None:
                mends, report = judged_mends(self.reading.decoder, plan.remove, self.reading.batch, self.judge)
            else:
                report = judged[1]
                mends = judged[0] if report.kept else ()
        except LyapunovPruneError as error:  # not every layer can take a map
            mending = Taken("mending", False, str(error), time.monotonic() - began)
            return Chosen(plan, found, (), None, (chosen, mending))
        seconds = time.monotonic() - began if judged is None else math.nan  # those of the search
        mending = Taken("mending", bool(mends), _told(report), seconds)
        return Chosen(plan.seen_on(*report.texts), found, mends, report, (chosen, mending))


def _told(report: MendReport) -> str:
    assert report.check is not None
    assert report.other is not None
    check, other = (f"{each.comparison.told()} of {each.measured_on.text}" for each in report.judgements)
    return f"{check}, {other}, used to choose{report.lost()}"


def _judged(found: BestRemoval, report: MendReport) -> MendReport:
    """`report` on the maps of the chosen set, judged by the losses that the search measured for it."""
    assert found.other_on is not None
    final = next(final for final in found.finals if final.layers == found.remove)
    check = Judgement(found.tried[found.chosen].windows, final.mended, found.checked_on)
    return replace(report, check=check, other=Judgement(final.other, final.other_mended, found.other_on))
