"""Schedule of a run: learning rates, when to go back, and what to keep, decided by the judged losses alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lyapunov_prune.evaluation.judging import compare

TRIAL = 4  # steps per trial of a rate
FACTOR = 10**0.5  # between two trial rates
LEAST_TRIALS = 3  # a rate and its two neighbours
TRIED = 0.3  # share of the steps that trials may take
ROUNDS = 6  # judged stretches of a run
PATIENCE = 3  # a run ends after so many rounds without a new best
WARM_UP = 0.1  # share of the steps in which the rate rises from zero

# Where a stretch starts: the original model, the best weights so far, or the end of the last stretch.
Begin = Literal["start", "best", "here"]


@dataclass(frozen=True)
class Stretch:
    """What to train next: `steps` steps at the peak rate `rate`, after `taken` steps of the schedule."""

    begin: Begin
    trial: bool
    rate: float
    steps: int
    taken: int = 0


@dataclass(frozen=True)
class Round:
    """A finished stretch, and the mean loss of each judging window after it (nats per token, float64)."""

    stretch: Stretch
    judged: np.ndarray

    @property
    def mean(self) -> float:
        """The mean loss; NaN counts as infinity."""
        mean = float(self.judged.mean())
        return math.inf if math.isnan(mean) else mean


def best_of(rounds: Sequence[Round], before: np.ndarray) -> int:
    """Index of the round of least judged loss; −1 if none is below the loss `before` training."""
    means = [float(before.mean()), *(each.mean for each in rounds)]
    return int(np.argmin(means)) - 1


def next_stretch(
    rounds: Sequence[Round], before: np.ndarray, *, rate: float, steps: int | None, trials: int
) -> Stretch | None:
    """The next stretch, given the rounds so far; None when the run is over.

    Up to `trials` rates are tried first, each for TRIAL steps from the start: `rate`, then smaller ones by factors of
    √10 while they improve, then larger ones, until the best has a worse neighbour on both sides. The best is the peak
    rate of the run, which starts from the best weights so far; without trials, or if the steps allow fewer than three,
    the peak is `rate`. The rate rises linearly from zero over a tenth of the steps and then follows half a cosine.
    After a round whose loss is above the best by a paired test, the run goes back to the best weights with a rate
    smaller by √10; PATIENCE rounds without a new best end the run. `steps` includes the trials; while it is None (to be
    derived from `minutes` after a trial) only trials are returned.
    """
    tried = [each for each in rounds if each.stretch.trial]
    run = rounds[len(tried) :]
    if not run and len(tried) < trials and (trial := _next_trial(tried, before, rate, steps)) is not None:
        return trial
    if steps is None:
        return None
    left = steps - sum(each.stretch.steps for each in tried)
    taken = sum(each.stretch.steps for each in run)
    if taken >= left:
        return None
    length = math.ceil((left - taken) / max(1, ROUNDS - len(run)))
    if not run:
        return Stretch("best", False, _peak(tried, before, rate), length)
    best = best_of(rounds, before)
    if len(run) - max(0, best + 1 - len(tried)) >= PATIENCE:
        return None
    last, kept = run[-1], before if best < 0 else rounds[best].judged
    if last.mean > float(kept.mean()) and (not np.isfinite(last.judged).all() or compare(last.judged, kept).pays):
        return Stretch("best", False, last.stretch.rate / FACTOR, length, taken)
    return Stretch("here", False, last.stretch.rate, length, taken)


def schedule(step: int, steps: int) -> float:
    """The share of the peak rate at `step`, above 0 and at most 1: a linear rise, then half a cosine."""
    rise = int(WARM_UP * steps)
    if step < rise:
        return (step + 1) / (rise + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def rates(stretch: Stretch, left: int) -> list[float]:
    """The learning rate of every step of a stretch of a run of `left` steps.

    A trial rises linearly to its peak. After going back to earlier weights the optimizer is reset and its first steps
    are large, so the rate is warmed up again over as many steps as at the beginning.
    """
    if stretch.trial:
        return [stretch.rate * (k + 1) / stretch.steps for k in range(stretch.steps)]
    rise = int(WARM_UP * left)
    shares = [schedule(stretch.taken + k, left) for k in range(stretch.steps)]
    if stretch.begin == "best" and stretch.taken:
        shares = [share * min(1.0, (k + 1) / (rise + 1)) for k, share in enumerate(shares)]
    return [stretch.rate * share for share in shares]


def _next_trial(trials: Sequence[Round], before: np.ndarray, rate: float, steps: int | None) -> Stretch | None:
    if steps is not None and max(len(trials) + 1, LEAST_TRIALS) * TRIAL > TRIED * steps:
        return None
    if not trials:
        return Stretch("start", True, rate, TRIAL)
    means = {each.stretch.rate: each.mean for each in trials}
    best = min(means, key=lambda tried: means[tried])
    if best == min(means) or means[best] >= float(before.mean()):
        return Stretch("start", True, min(means) / FACTOR, TRIAL)
    if best == max(means):
        return Stretch("start", True, best * FACTOR, TRIAL)
    return None


def _peak(trials: Sequence[Round], before: np.ndarray, rate: float) -> float:
    """The best rate, or the smallest one tried if none improved on the original model."""
    if not trials:
        return rate
    best = best_of(trials, before)
    return min(each.stretch.rate for each in trials) if best < 0 else trials[best].stretch.rate
