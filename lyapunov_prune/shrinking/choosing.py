"""Which layers go, their gaps mended where that pays; and how many, where the target is what may be lost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.mending.judge import fitting_and_judges, judged_mends
from lyapunov_prune.mending.mend import Mend, mapped
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.predictions.divergence import divergences_of
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking.best import best_removal
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.shrinking.report import Taken


@dataclass(frozen=True, eq=False)
class Choice:
    """The layers that go, and the maps that close their gaps, none where they do not pay."""

    plan: PruningPlan
    found: BestRemoval
    mends: tuple[Mend, ...]
    report: MendReport | None
    taken: tuple[Taken, ...]


@dataclass(frozen=True, eq=False)
class Chooser:
    """Chooses layers of `model` on `batch` by criterion `best`, and mends by half of its windows.

    `judge` is the second text that mending is judged by. A search may spend `search` forwards, and compares no mended
    sets, nor mends, without `mend`. Searches are kept in `folder`, by the number of layers.
    """

    model: PreTrainedModel
    batch: TokenBatch
    judge: TokenBatch
    search: float | None
    mend: bool
    folder: Path | None
    resume: bool
    batch_size: int

    def choose(self, remove: int) -> Choice:
        began = time.monotonic()
        found = best_removal(
            self.model,
            self.batch,
            remove,
            search=self.search,
            mend=self.mend,
            judge=self.judge if self.mend else None,
            folder=None if self.folder is None else self.folder / f"best-{remove}",
            resume=self.resume,
            batch_size=self.batch_size,
        )
        plan = found.plan(remove)
        told = f"best of {len(found.tried)} sets by the loss"
        chosen = Taken("layers chosen", True, told, time.monotonic() - began)
        if not self.mend:
            return Choice(plan, found, (), None, (chosen, Taken("mending", False, "no time left", 0.0)))
        mends, report, mending = self._mended(plan)
        if report is not None:
            for on in (report.measured_on, *(each.measured_on for each in report.judgements)):
                plan = plan.seen_on(on)
        return Choice(plan, found, mends, report, (chosen, mending))

    def _mended(self, plan: PruningPlan) -> tuple[tuple[Mend, ...], MendReport | None, Taken]:
        began = time.monotonic()
        try:
            mends, report = judged_mends(self.model, plan.remove, self.batch, self.judge)
        except LyapunovPruneError as error:  # not every layer can take a map
            return (), None, Taken("mending", False, str(error), time.monotonic() - began)
        assert report.check is not None
        assert report.other is not None
        told = f"{report.check.comparison.told()}, {np.expm1(report.other.comparison.change):+.1%} on another text"
        return mends, report, Taken("mending", bool(mends), told, time.monotonic() - began)


@in_eval_mode
@torch.no_grad()
def divergence(model: PreTrainedModel, batch: TokenBatch, judge: TokenBatch, choice: Choice, batch_size: int) -> float:
    """KL(dense ‖ pruned and mended) in nats a token on the windows of `batch` that nothing was fitted on."""
    _, checking, _ = fitting_and_judges(read(model, batch), judge)
    removed = choice.plan.remove
    first = min([*removed, *(mend.place.layer for mend in choice.mends)])
    change = partial(_without, checking, removed, choice.mends)
    return float(divergences_of(checking, [(first, change)], 1.0, batch_size, "divergence")[0, 1])


@contextmanager
def _without(reading: Reading, removed: Sequence[int], mends: Sequence[Mend]) -> Iterator[None]:
    with reading.prefix.without(removed), mapped(reading.structure.layers, mends):
        yield
