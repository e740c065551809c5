"""Compare a changed model with the one before the change, window by window, on text not used for the change."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.linalg import require_numbers

LEVEL = 0.025  # one-sided p-value for a gain: the 95 % interval then ends below zero
POWER = 4  # least number of windows for a paired test; with fewer, the lower mean decides

EVERY, MOST = 8, 8  # every eighth window judges, up to eight


def apart(reading: Reading, every: int = EVERY, most: int | None = MOST, least: int = 2) -> tuple[Reading, Reading]:
    """Split windows into those to learn from and those to judge by: every `every`-th one, at most `most`.

    A reading that is split again gives the same two readings, with what was measured on them (`Reading.once`). Raises
    LyapunovPruneError for a batch of fewer than `least` windows.
    """
    batch = reading.batch
    if len(batch) < least:
        raise LyapunovPruneError(
            f"too few windows ({len(batch)}) to learn from some and judge by the others; give {least} or more (more "
            "--tokens, or a shorter --context)"
        )
    judging = range(min(every, len(batch)) - 1, len(batch), every)[:most]
    teaching = [window for window in range(len(batch)) if window not in judging]
    parts = teaching, list(judging)
    teach, judge = reading.once(
        ("apart", every, most), lambda: [replace(reading, batch=batch.take(part)) for part in parts]
    )
    return teach, judge


@dataclass(frozen=True)
class Comparison:
    """Paired comparison of two losses, nats per token, over the same windows.

    `change` is mean(after − before), negative for a gain; `low` and `high` are its 95 % Student's t interval, and
    `p_value` is that of the one-sided paired t-test of change < 0. These three are NaN for fewer than two windows; if
    every window changes by the same amount the interval has no width and the p-value is 0 or 1.
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
        """Whether to keep the change: the mean is lower, and with enough windows also significantly."""
        return self.change < 0 and (self.p_value < LEVEL or not self.has_power)

    def told(self) -> str:
        """One line: change of the perplexity in per cent, its interval, and the p-value."""
        ratio = f"{np.expm1(self.change):+.1%} perplexity"
        if not self.has_power:
            return f"{ratio} on {self.windows} windows, too few for a test: uncertain"
        return f"{ratio} ({np.expm1(self.low):+.1%} to {np.expm1(self.high):+.1%}) on {self.windows} windows"


def chance(losses: np.ndarray, chosen: np.ndarray) -> float:
    """The p-value of `chosen` having lower losses than `losses` on these windows; NaN if it cannot be told.

    That is so for losses that are not finite, and for too few windows. Raises as `compare`.
    """
    told = compare(losses, chosen) if np.isfinite(losses).all() else None
    return told.p_value if told is not None and told.has_power else np.nan


def compare(before: np.ndarray, after: np.ndarray) -> Comparison:
    """Compare the loss of every window (nats per token) after a change with that before it.

    A changed loss that is not finite never pays: its change is +inf. Raises LyapunovPruneError for different numbers of
    windows, for none, and for a loss before the change that is not finite.
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if before.shape != after.shape or before.ndim != 1 or not len(before):
        raise LyapunovPruneError(
            f"losses of {after.shape} windows after the change against {before.shape} before; score the same windows"
        )
    require_numbers(before, "losses before the change")
    difference = after - before
    if not np.isfinite(difference).all():
        return Comparison(np.inf, np.nan, np.nan, 1.0, len(before))
    change = float(difference.mean())
    if len(difference) < 2:
        return Comparison(change, np.nan, np.nan, np.nan, len(before))
    error = float(difference.std(ddof=1)) / len(difference) ** 0.5
    if error == 0:
        return Comparison(change, change, change, 0.0 if change < 0 else 1.0, len(before))
    from scipy import stats  # imported late: pruning files alone scores nothing

    reach = error * float(stats.t.ppf(0.975, len(difference) - 1))
    p_value = float(stats.t.cdf(change / error, len(difference) - 1))
    return Comparison(change, change - reach, change + reach, p_value, len(before))
