"""The healing of `shrink`, within the minutes that are left."""

from __future__ import annotations

import time
from pathlib import Path

from transformers import PreTrainedModel

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import Diverged
from lyapunov_prune.healing.heal import STEPS, heal
from lyapunov_prune.healing.report import Healed
from lyapunov_prune.models.launched import from_each
from lyapunov_prune.shrinking.cost import Estimate
from lyapunov_prune.shrinking.report import Taken
from lyapunov_prune.shrinking.request import Request


def healed_from(
    request: Request,
    pruned: PreTrainedModel,
    learn: TokenBatch,
    expected: Estimate,
    minutes: float | None,
    folder: Path | None,
) -> tuple[Healed | None, Taken]:
    """The healed model, None where healing was skipped or does not pay."""
    if minutes == 0:
        return None, Taken("healing", False, "no time left", 0.0)
    began = time.monotonic()
    try:
        done = heal(
            pruned,
            request.model,
            learn,
            steps=(request.steps or STEPS) if minutes is None else None,
            minutes=minutes,
            rank=expected.rank,
            per_step=len(from_each(request.model, None)),
            seed=request.seed,
            folder=folder,
            batch_size=request.batch_size,
        )
    except Diverged as error:
        return None, Taken("healing", False, str(error), time.monotonic() - began)
    kept = done.report.kept >= 0
    told = f"{done.report.steps} steps, {done.report.gain.told()}"
    return done if kept else None, Taken("healing", kept, told, time.monotonic() - began)


def words_of(request: Request, expected: Estimate, minutes: float | None) -> list[str]:
    """The options of `heal` that do the same by hand."""
    words = ["--steps", f"{request.steps or STEPS}"] if minutes is None else ["--minutes", f"{minutes:g}"]
    if expected.rank is not None:
        words += ["--update-rank", f"{expected.rank}"]
    dtype = str(request.model.dtype).removeprefix("torch.")
    if dtype != "float32" and "--dtype" not in request.source:  # that of `heal`
        words += ["--dtype", dtype]
    return words
