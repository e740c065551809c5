"""Perplexity and generated text predicted from a measured divergence, by a fit over removed sets of layers.

`expected.json` is written by experiments/4_hierarchy/prediction/expected.py from measurements.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("expected.json")


@dataclass(frozen=True)
class Line:
    """`ln y = intercept + slope ln KL`, with an interval of half width `width` that holds a `share` of the fitted sets.

    The width is the `⌈(n + 1) share⌉`-th smallest of the n leave-one-out residuals `|residual|` (the jackknife of
    Barber et al., Annals of Statistics 49, 2021, arXiv:1905.02928, §1.2, which guarantees no coverage). `covered` is
    the share of held-out sets inside the interval.
    """

    intercept: float
    slope: float
    width: float
    covered: float

    def at(self, kl: float) -> tuple[float, float, float]:
        """`ln y` at a divergence: the estimate, the lower and the upper end of the interval."""
        middle = self.intercept + self.slope * math.log(kl)
        return middle, middle - self.width, middle + self.width


@dataclass(frozen=True)
class Expectation:
    """Two fitted lines over the divergence of a set of removed layers at T = 1, and the data behind them.

    - `perplexity`: y is the log of the perplexity ratio on held-out text;
    - `first_difference`: y is one plus the decoding step, out of `steps`, at which the greedy texts differ first,
      averaged over prompts;
    - `unseen`: smallest share of the sets of one model inside the interval when the lines are fitted on the other
      models, one number per line.
    """

    models: tuple[str, ...]
    fitted: int
    held_out: int
    share: float
    least: float
    most: float
    steps: int
    perplexity: Line
    first_difference: Line
    unseen: tuple[float, float]

    def told(self, kl: float, removed: str = "layers") -> str:
        """One line on what to expect at a measured divergence; outside the range of the fit it says only that.

        Adds a warning if something other than whole layers was removed.
        """
        if not self.least <= kl <= self.most:
            return (
                f"The effect of {kl:.3g} nats per token is not predicted: the fit covers {self.least:.3g} to "
                f"{self.most:.3g}."
            )
        ratio, low, high = (math.exp(math.exp(x)) for x in self.perplexity.at(kl))
        part, first, last = (min(max(math.exp(x) - 1, 0.0), self.steps) for x in self.first_difference.at(kl))
        worst = min(self.perplexity.covered, self.first_difference.covered, *self.unseen)
        held = f"of {self.held_out} held-out sets {self.perplexity.covered:.0%} and {self.first_difference.covered:.0%}"
        held += f" lie inside, for a model left out of the fit {self.unseen[0]:.0%} and {self.unseen[1]:.0%}" + (
            ", far fewer than stated" if worst < self.share - 0.1 else ""
        )
        beyond = "" if removed == "layers" else f" The fit is for removed layers, and here {removed} were removed."
        models = f"{len(self.models)} model{'s' * (len(self.models) > 1)} ({', '.join(self.models)})"
        return (
            f"At {kl:.3g} nats per token expect {ratio:.3g} times the dense perplexity ({low:.3g} to {high:.3g}) and "
            f"greedy text equal to the dense model's for {part:.2g} tokens ({first:.2g} to {last:.2g}); these are "
            f"{self.share:.0%} intervals from {self.fitted} sets of layers of {models}; {held}.{beyond}"
        )


@cache
def expectation() -> Expectation:
    """The fit that ships with the package."""
    return from_json(json.loads(TABLE.read_text(encoding="utf-8")))


def from_json(table: dict[str, Any]) -> Expectation:
    kept = {name: table[name] for name in ("fitted", "held_out", "share", "least", "most", "steps")}
    perplexity, first_difference = (Line(**table[name]) for name in ("perplexity", "first_difference"))
    shares = table["unseen_model"].values()
    return Expectation(
        models=tuple(table["models"]),
        perplexity=perplexity,
        first_difference=first_difference,
        unseen=(min(each["perplexity"] for each in shares), min(each["first_difference"] for each in shares)),
        **kept,
    )
