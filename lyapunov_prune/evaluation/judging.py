"""Compare a changed model with the one before the change, window by window, on text not used for the change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.results.result import MeasuredOn

LEVEL = 0.025  # one-sided p-value for a gain: the 95 % interval then ends below zero
POWER = 4  # contiguous blocks of windows that an interval compares, and so the least number of windows for one

OF, MOST = 8, 16  # one window in eight judges, up to sixteen
EARLY = 0.005  # what each look before the last spends of LEVEL (`decided`)


def apart(reading: Reading, of: int = OF, most: int | None = MOST, least: int = 1) -> tuple[Reading, Reading]:
    """Split windows into those to learn from and one in `of` to judge by, `least` to `most` of them.

    The text is cut into POWER stretches, and the end of each judges. So a `Comparison` compares the stretches, which
    stand for all of the text, and few judging windows share an article with those to learn from, as alternating ones
    would. A reading that is split again gives the same two readings, with what was measured on them (`Reading.once`).
    Raises LyapunovPruneError for fewer than `2 * least` windows.
    """
    parts = parted(reading.batch, of, most, least)
    key = "apart", len(parts[1])
    teach, judge = reading.once(key, lambda: [replace(reading, batch=reading.batch.take(part)) for part in parts])
    return teach, judge


def parted(batch: TokenBatch, of: int = OF, most: int | None = MOST, least: int = 1) -> tuple[list[int], list[int]]:
    """The windows to learn from and to judge by, of `apart`."""
    require_windows(batch, 2 * least)
    judges = max(len(batch) // of, least)
    judging = ends(len(batch), judges if most is None else min(judges, most))
    return [window for window in range(len(batch)) if window not in judging], judging


def ends(windows: int, judges: int) -> list[int]:
    """The ends of POWER stretches of `windows`, or of fewer: `judges` of them in all."""
    count = min(judges, POWER)
    stretches, shares = (np.array_split(np.arange(number), count) for number in (windows, judges))
    return [int(w) for stretch, share in zip(stretches, shares, strict=True) for w in stretch[-len(share) :]]


def require_windows(batch: TokenBatch, least: int = POWER) -> TokenBatch:
    """`batch`, refused with LyapunovPruneError if it has fewer than `least` windows."""
    if len(batch) < least:
        raise LyapunovPruneError(
            f"{batch.text} has too few windows ({len(batch)}) to fit and to validate on; give {least} or more "
            "(more --tokens, or a shorter --context)"
        )
    return batch


@dataclass(frozen=True)
class Comparison:
    """Paired comparison of two losses, nats per token, over the same windows in the order of their text.

    `change` is mean(after − before), negative for a gain. Windows that follow each other are alike, so its error is
    that of the means of POWER contiguous blocks of windows: `low` and `high` are the Student's t interval over them (95
    %, or more if looks at fewer windows have spent some of `level`: `decided`), and `p_value` is that of the one-sided
    test of change < 0. All three are NaN for fewer windows than blocks; if every block changes by the same amount the
    interval has no width and the p-value is 0 or 1.
    """

    change: float
    low: float
    high: float
    p_value: float
    windows: int
    level: float = LEVEL

    @property
    def has_power(self) -> bool:
        return self.windows >= POWER

    @property
    def pays(self) -> bool:
        """Whether to keep the change: the loss is lower, significantly. Too few windows never say so."""
        return self.change < 0 and self.p_value < self.level

    @property
    def harms(self) -> bool:
        """Whether the loss is higher, significantly, or not finite."""
        return self.change > 0 and not self.low <= 0

    def told(self) -> str:
        """One line: change of the perplexity in per cent, its interval, and the number of windows."""
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


Losses = tuple[np.ndarray, np.ndarray]  # mean loss of every window (nats per token) before a change and after


@dataclass(frozen=True)
class Judgement:
    """The mean loss of every window of a text (nats per token) before a change and after, compared at `level`."""

    before: np.ndarray
    after: np.ndarray
    measured_on: MeasuredOn
    level: float = LEVEL

    @property
    def comparison(self) -> Comparison:
        return compare(self.before, self.after, self.level)

    def told(self) -> str:
        """One line: the change of the perplexity of this text, which decided whether it was kept."""
        on = self.measured_on
        return f"{self.comparison.told()} of {on.text} ({on.split}), used to choose"


def decided(
    sets: Sequence[Sequence[int]], losses: Callable[[list[int]], Losses]
) -> tuple[list[int], np.ndarray, np.ndarray, float]:
    """Measure a change on as many windows as it takes to say whether it pays: those of one of `sets`, smallest first.

    Each set of window numbers holds the one before it, and `losses` is asked for windows that were not measured yet.
    Looking stops when the change pays or harms at level EARLY. The last look has what the others left of LEVEL, so by
    Bonferroni's inequality a change that does not pay is kept with probability LEVEL at most, however many sets.
    Returns the windows in order, their losses before and after, and the level to compare them at.
    """
    known: dict[int, tuple[float, float]] = {}
    for some in sets:
        new = [window for window in some if window not in known]
        known |= dict(zip(new, zip(*losses(new), strict=True), strict=True))
        seen = sorted(known)
        before, after = np.array([known[window] for window in seen]).T
        early = compare(before, after, EARLY)
        if early.pays or early.harms:
            return seen, before, after, LEVEL
    return seen, before, after, LEVEL - EARLY * (len(sets) - 1)


def compare(before: np.ndarray, after: np.ndarray, level: float = LEVEL) -> Comparison:
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
        return Comparison(np.inf, np.nan, np.nan, 1.0, len(before), level)
    change = float(difference.mean())
    if len(difference) < POWER:
        return Comparison(change, np.nan, np.nan, np.nan, len(before), level)
    blocks = np.array([block.mean() for block in np.array_split(difference, POWER)])
    error = float(blocks.std(ddof=1)) / POWER**0.5
    if error == 0:
        return Comparison(change, change, change, 0.0 if change < 0 else 1.0, len(before), level)
    from scipy import stats  # imported late: pruning files alone scores nothing

    reach = error * float(stats.t.ppf(1 - level, POWER - 1))
    p_value = float(stats.t.cdf(change / error, POWER - 1))
    return Comparison(change, change - reach, change + reach, p_value, len(before), level)
