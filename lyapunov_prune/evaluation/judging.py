"""A changed model against the one before it, window by window, on text that the change did not learn from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Reading

LEVEL = 0.025  # one-sided p-value below which a gain is believed: the 95 % interval then ends below zero
POWER = 4  # windows from which a paired test says anything; below it the lower mean decides

EVERY, MOST = 8, 8  # every eighth window judges, up to eight of them


def apart(reading: Reading, every: int = EVERY, most: int | None = MOST) -> tuple[Reading, Reading]:
    """The windows that a step may learn from, and those that judge it: every `every`-th one, `most` of them if given.

    Raises LyapunovPruneError for a batch of one window.
    """
    batch = reading.batch
    if len(batch) < 2:
        raise LyapunovPruneError(
            "one window cannot both teach and judge; give two or more (more --tokens, or a shorter --context)"
        )
    judging = range(min(every, len(batch)) - 1, len(batch), every)[:most]
    teaching = [window for window in range(len(batch)) if window not in judging]
    return replace(reading, batch=batch.take(teaching)), replace(reading, batch=batch.take(judging))


@dataclass(frozen=True)
class Comparison:
    """The paired comparison of two losses, nats a token, over the same windows.

    `change` is mean(after − before), negative where the change pays; `low` and `high` are its 95 % interval by
    Student's t, and `p_value` is that of the one-sided paired t-test of change < 0. All three are NaN for fewer than
    two windows; where every window changes by the same amount the interval has no width and the p-value is 0 or 1.
    """

    change: float
    low: float
    high: float
    p_value: float
    windows: int

    @property
    def has_power(self) -> bool:
        return self.windows >= POWER

    @property
    def pays(self) -> bool:
        """Whether the change is kept: its mean is lower, and by a test, where there are windows enough for one."""
        return self.change < 0 and (self.p_value < LEVEL or not self.has_power)

    def told(self) -> str:
        """One line: the change in per cent of perplexity, its interval, and how sure it is."""
        ratio = f"{np.expm1(self.change):+.1%} perplexity"
        if not self.has_power:
            return f"{ratio} on {self.windows} windows, too few for a test: uncertain"
        return f"{ratio} ({np.expm1(self.low):+.1%} to {np.expm1(self.high):+.1%}) on {self.windows} windows"


def compare(before: np.ndarray, after: np.ndarray) -> Comparison:
    """Compare the mean loss of every window (nats a token) after a change with that before it.

    A loss of the changed model that is not finite never pays: its change is +inf. Raises LyapunovPruneError for
    different numbers of windows, for none, and where a loss before the change is not finite.
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if before.shape != after.shape or before.ndim != 1 or not len(before):
        raise LyapunovPruneError(
            f"losses of {after.shape} windows after the change against {before.shape} before; score the same windows"
        )
    if not np.isfinite(before).all():
        raise LyapunovPruneError("a loss before the change is not finite; check the weights of the model")
    difference = after - before
    if not np.isfinite(difference).all():
        return Comparison(np.inf, np.nan, np.nan, 1.0, len(before))
    change = float(difference.mean())
    if len(difference) < 2:
        return Comparison(change, np.nan, np.nan, np.nan, len(before))
    error = float(difference.std(ddof=1)) / len(difference) ** 0.5
    if error == 0:
        return Comparison(change, change, change, 0.0 if change < 0 else 1.0, len(before))
    reach = error * float(stats.t.ppf(0.975, len(difference) - 1))
    p_value = float(stats.t.cdf(change / error, len(difference) - 1))
    return Comparison(change, change - reach, change + reach, p_value, len(before))
