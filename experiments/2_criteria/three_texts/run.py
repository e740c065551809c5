"""What each criterion's choice leaves on several texts: does the order of criteria hang on the text (§6.5, Table 3)?

    python experiments/2_criteria/three_texts/run.py [--model MODEL] --text builtin --text A.txt --text B.jsonl

The layers that a criterion chooses on one half of a text are removed together, and perplexity is measured on the other.
Writes MODEL-TEXT.json beside this file, one a text; what all of them say goes into README.md by `make tables`.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.all import COUNTS, rankings
from experiments.common import Inputs, on_each_text, run_command
from experiments.compressions import ALIKE, told
from experiments.statements import ratio, table
from experiments.unseen import OnUnseenText, settings
from lyapunov_prune.ranking.table import DEFAULT

HERE = Path(__file__).parent
SAME = "the same layers"
CRITERIA = ("bi", "blend", "rho", "rho, token pooling", "angular", "from-end")


@dataclass(frozen=True)
class Chosen:
    """The layers that a criterion gives up first, and the mean loss of each window without them, nats a token."""

    criterion: str
    removed: tuple[int, ...]
    windows: np.ndarray


@dataclass(frozen=True)
class OnOneText(OnUnseenText):
    """Every criterion's choice at each of `COUNTS`."""

    chosen: tuple[Chosen, ...]

    def of(self, criterion: str, count: int) -> Chosen:
        return next(c for c in self.chosen if c.criterion == criterion and len(c.removed) == count)


def measure(given: Inputs) -> OnOneText:
    order = rankings(given, given.profile())
    plans = {(name, count): order[name].plan(count).remove for name in CRITERIA for count in COUNTS}
    dense, losses = given.without(plans.values())
    chosen = tuple(Chosen(name, gone, losses[gone]) for (name, _), gone in plans.items())
    return OnOneText(dense, *given.origins, chosen)


def written() -> dict[str, str]:
    results = OnOneText.all(HERE)
    return {"setting": settings(results), "removed": removed(results), "default": default(results)}


def removed(results: list[OnOneText]) -> str:
    """Perplexity over that of the dense model."""
    head = ("removed", "criterion", *(r.name for r in results))
    lines = []
    for count in COUNTS:
        for name in CRITERIA:
            gained = [r.of(name, count).windows - r.dense for r in results]
            lines.append((count, f"`{name}`", *map(ratio, gained)))
    return table(head, lines)


def default(results: list[OnOneText]) -> str:
    """The default against every other criterion, paired by window: on how many of the texts it is better, and so on."""
    words = ("better", "worse", ALIKE, SAME)
    rows = []
    for count in COUNTS:
        for other in CRITERIA:
            if other != DEFAULT:
                times = Counter(compared(r, other, count) for r in results)
                rows.append([count, f"`{other}`", *(times[word] for word in words)])
    return table(["removed", f"`{DEFAULT}` against", *words], rows)


def compared(result: OnOneText, other: str, count: int) -> str:
    """Whether the default leaves less perplexity than `other`; the same layers are the same."""
    mine, theirs = result.of(DEFAULT, count), result.of(other, count)
    if mine.removed == theirs.removed:
        return SAME
    return told(mine, theirs)


main = on_each_text(measure, HERE)

if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
