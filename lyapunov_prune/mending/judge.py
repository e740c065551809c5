"""Whether mending pays: the pruned model with and without its maps, on text that was not used for fitting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lyapunov_prune.data.batch import TokenBatch, Tokens
from lyapunov_prune.evaluation.judging import POWER, Judgement, apart, require_windows
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.own_text import self_generated
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.mending.mend import Mend, fit_mends, mapped
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.models.decoder import Model, in_memory
from lyapunov_prune.models.structure import in_eval_mode

# Size of the text that the dense model writes, if no judging text is given.
_TOKENS, _CONTEXT = 2048, 128
_SEED = 10**6  # a seed that no training text uses


@in_eval_mode
def judged_mends(
    model: Model, removed: Sequence[int], batch: Readable, judge: Tokens | None = None
) -> tuple[tuple[Mend, ...], MendReport]:
    """`fit_mends` on half of `batch` (`apart`), judged on the rest and on `judge`; no maps if they do not pay.

    `judge` is another text; with None the dense model writes one (`second_text`). The report holds both judgements.
    Raises LyapunovPruneError for fewer windows than judge (8 of `batch`, 4 of `judge`), and the errors of `fit_mends`
    and `second_text`.
    """
    reading = read(in_memory(model), batch)
    fitting, *judges = fitting_and_judges(reading, judge)
    mends, report = fit_mends(reading.decoder, removed, fitting, of=2)
    judged = [Judgement(losses(j, removed), losses(j, removed, mends), j.measured_on()) for j in judges]
    report = replace(report, check=judged[0], other=judged[1])
    return (mends if report.kept else ()), report


def fitting_and_judges(reading: Reading, judge: Tokens | None) -> tuple[Reading, Reading, Reading]:
    """Half of the windows to fit on, the other half to judge by, and another text to judge by."""
    fitting, check = apart(reading, of=2, most=None, least=POWER)
    other = read(reading.decoder, second_text(reading) if judge is None else judge)
    require_windows(other.batch)
    return fitting, check, other


def second_text(reading: Reading, folder: str | Path | None = None) -> TokenBatch:
    """A text written by the dense model in short windows, kept in `folder`. Raises like `self_generated`."""
    context = reading.structure.at_most(_CONTEXT)
    return self_generated(reading.decoder, tokens=_TOKENS, context=context, seed=_SEED, folder=folder)


def losses(reading: Reading, removed: Sequence[int], mends: Sequence[Mend] = ()) -> np.ndarray:
    """The mean loss of every window (nats per token) without the layers `removed`, with the maps of `mends`."""
    scorer = reading.scorer
    with reading.prefix.without(removed), mapped(reading.structure.layers, mends):
        return np.array(dealt(reading, 1, lambda first, ids: scorer(ids)[0][0], "judging"))
