"""What a measured divergence has meant for perplexity and generated text, from a table fitted on whole layers removed.

`expected.json` is written by experiments/19_prediction/expected.py from measurements, and asked here.
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
    """`ln y = intercept + slope ln KL`, and the half width within which a `share` of the fitted sets lie.

    Of n sets the width is the `⌈(n + 1) share⌉`-th smallest `|residual|`, each from the line of the n − 1 others (the
    jackknife of Barber et al., Annals of Statistics 49, 2021, arXiv:1905.02928, §1.2, which promises no coverage).
    `covered` is the share of held-out sets that lie inside.
    """

    intercept: float
    slope: float
    width: float
    covered: float

    def at(self, kl: float) -> tuple[float, float, float]:
        """`ln y` at a divergence, its lower and its upper end."""
        middle = self.intercept + self.slope * math.log(kl)
        return middle, middle - self.width, middle + self.width


@dataclass(frozen=True)
class Expectation:
    """Two lines over the divergence of a set of layers, both at T = 1, and what they rest on.

    `perplexity`: y the log of the perplexity ratio on held-out text. `first_difference`: y one more than the step, of
    `steps`, at which greedy texts of the two models part, a mean over prompts.
    `unseen`: the least share of the sets of a model inside, of both, where the lines are fitted on the others.
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
        """What to expect at a measured divergence; a line for whom something else than whole layers was removed.

        Of a divergence outside of those that the table was fitted on it says only that.
        """
        if not self.least <= kl <= self.most:
            return (
                f"What {kl:.3g} nats a token mean for perplexity is not foretold: the table knows {self.least:.3g} to "
                f"{self.most:.3g}."
            )
        ratio, low, high = (math.exp(math.exp(x)) for x in self.perplexity.at(kl))
        part, first, last = (min(max(math.exp(x) - 1, 0.0), self.steps) for x in self.first_difference.at(kl))
        worst = min(self.perplexity.covered, self.first_difference.covered, *self.unseen)
        held = f"of {self.held_out} held-out sets {self.perplexity.covered:.0%} and {self.first_difference.covered:.0%}"
        held += f" lie inside, of a model that a fit had not seen {self.unseen[0]:.0%} and {self.unseen[1]:.0%}" + (
            ", far fewer than it says" if worst < self.share - 0.1 else ""
        )
        beyond = "" if removed == "layers" else f" It rests on whole layers removed, and these are {removed}."
        models = f"{len(self.models)} model{'s' * (len(self.models) > 1)} ({', '.join(self.models)})"
        return (
            f"At {kl:.3g} nats a token expect {ratio:.3g} times the dense perplexity ({low:.3g} to {high:.3g}), and "
            f"greedy text that is the dense model's for {part:.2g} tokens ({first:.2g} to {last:.2g}); these are "
            f"{self.share:.0%} intervals from {self.fitted} sets of layers of {models}; {held}.{beyond}"
        )


@cache
def expectation() -> Expectation:
    """The table that the package ships."""
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
