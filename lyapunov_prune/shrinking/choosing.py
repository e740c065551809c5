"""Choose the layers to remove, and mend their gaps if that pays."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.mending.judge import judged_mends
from lyapunov_prune.mending.mend import Mend
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking.best import best_removal
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.shrinking.report import Taken


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

    `judge` is the second text that judges mending. A search may spend `search` forwards. Searches are kept in `folder`;
    what they measure on all layers is measured once.
    """

    reading: Reading
    judge: TokenBatch
    search: float | None
    folder: Path | None
    batch_size: int

    def choose(self, remove: int) -> Chosen:
        began = time.monotonic()
        found = best_removal(
            self.reading.decoder,
            self.reading,
            remove,
            search=self.search,
            folder=self.folder,
            batch_size=self.batch_size,
        )
        plan = found.plan(remove)
        told = f"best of {len(found.tried)} sets by the loss"
        chosen, began = Taken("layers chosen", True, told, time.monotonic() - began), time.monotonic()
        try:
            mends, report = judged_mends(self.reading.decoder, plan.remove, self.reading.batch, self.judge)
        except LyapunovPruneError as error:  # not every layer can take a map
            mending = Taken("mending", False, str(error), time.monotonic() - began)
            return Chosen(plan, found, (), None, (chosen, mending))
        mending = Taken("mending", bool(mends), _told(report), time.monotonic() - began)
        return Chosen(plan.seen_on(*report.texts), found, mends, report, (chosen, mending))


def _told(report: MendReport) -> str:
    assert report.check is not None
    assert report.other is not None
    check, other = (f"{each.comparison.told()} of {each.measured_on.text}" for each in report.judgements)
    return f"{check}, {other}, used to choose{report.lost()}"
