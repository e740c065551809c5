"""What a change of perplexity means to someone who has to decide: here alone it is good, costly or useless."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lyapunov_prune.errors import printable
from lyapunov_prune.results.wording import between

GOOD, COSTLY = 1.1, 2.0  # times the perplexity of the dense model, at the most
GENTLE = f"less than {100 * (GOOD - 1):.0f} % more perplexity"


class Ratio(NamedTuple):
    """The perplexity as a multiple of the dense model's on the same windows, and its 95 % interval (NaN: none)."""

    value: float
    low: float
    high: float

    @property
    def is_good(self) -> bool:
        return self.high <= GOOD

    def told(self) -> str:
        return f"perplexity × {self.value:.4g} ({between(self.low, self.high, 4)})"

    def means(self) -> str:
        """What the interval means, judged by its upper end."""
        if math.isnan(self.high):
            return "Not certain: there are too few windows of text for an interval; give more --tokens."
        if self.is_good:
            sure = "better than" if self.high < 1 else "a little worse than" if self.low > 1 else ""
            told = f"{sure} the dense model" if sure else "no significant difference from the dense model"
            return f"Good: {told} on this text."
        wide = "; the interval is wide, and more --tokens would narrow it" if self.low <= GOOD else ""
        if self.high <= COSTLY:
            return f"Costly: up to {self.high - 1:.0%} more perplexity{wide}."
        wide = wide if self.low <= COSTLY else ""
        return f"Do not use: up to {self.high:.3g} times the perplexity{wide}."


@dataclass(frozen=True)
class Worth:
    """For a card or a header: `perplexity` on `tokens` of `text`, its `ratio` to the dense one, and a line on `speed`.

    `perplexity` is None where only the ratio was measured.
    """

    perplexity: float | None
    ratio: Ratio
    text: str
    tokens: int
    speed: str = ""

    def told(self) -> str:
        """The ratio in a sentence."""
        return printable(f"P{self.ratio.told()[1:]} of the dense model's, on {self.tokens:,} tokens of {self.text}.")
