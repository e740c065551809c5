"""How ρ and Block Influence are put on one scale in a blend, and whether the ends of the model should stay (§6.5).

    python experiments/2_criteria/scales/run.py [--model MODEL] --text builtin --text A.txt --text B.jsonl

Layers are chosen on one half of a text; perplexity is measured on the other. Writes MODEL-TEXT.json beside this file,
one a text; what all of them say goes into README.md by `make tables`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from scipy import stats

from experiments.common import Inputs, on_each_text, run_command
from experiments.compressions import ALIKE, told
from experiments.statements import short, span, table
from experiments.unseen import OnUnseenText, settings
from lyapunov_prune.ranking.candidates import least
from lyapunov_prune.ranking.criteria.blend_minmax import minmax

HERE = Path(__file__).parent
COUNTS = (2, 4, 7)
PAPERS = "blend, minmax"


def ranks(x: np.ndarray) -> np.ndarray:
    return stats.rankdata(x)


def robust(x: np.ndarray) -> np.ndarray:
    """About the median, by the range between the quartiles."""
    return (x - np.median(x)) / stats.iqr(x)


SCALES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"minmax": minmax, "ranks": ranks, "robust": robust}


@dataclass(frozen=True)
class Choice:
    """The layers that go by `way`; `ends` where the first and the last layer may go too, and are scaled with."""

    way: str
    ends: bool
    removed: tuple[int, ...]
    windows: np.ndarray


@dataclass(frozen=True)
class ScalesOnOneText(OnUnseenText):
    choices: tuple[Choice, ...]


def measure(given: Inputs) -> ScalesOnOneText:
    profile = given.profile()
    away, bi = abs(profile.contraction.rho - 1), profile.influence.influence
    chosen: dict[tuple[str, bool, int], tuple[int, ...]] = {}
    for ends in (True, False):
        free = tuple(range(len(bi)))[slice(None) if ends else slice(1, -1)]
        scores = {"rho": away[list(free)], "bi": bi[list(free)]}
        scores |= {f"blend, {name}": scale(scores["rho"]) + scale(scores["bi"]) for name, scale in SCALES.items()}
        for way, score in scores.items():
            for count in COUNTS:
                chosen[way, ends, count] = least(score, count, free)
    dense, losses = given.without(set(chosen.values()))
    choices = tuple(Choice(way, ends, gone, losses[gone]) for (way, ends, _), gone in chosen.items())
    return ScalesOnOneText(dense, *given.origins, choices)


def written() -> dict[str, str]:
    results = ScalesOnOneText.all(HERE)
    parts = {"setting": settings, "chosen": chosen_table, "against": against}
    return {name: part(results) for name, part in parts.items()}


def chosen_table(results: Sequence[ScalesOnOneText]) -> str:
    """Perplexity over dense, and behind a stroke that with both ends kept."""
    ways = list(dict.fromkeys(c.way for c in results[0].choices))
    rows = []
    for r in results:
        for count in COUNTS:
            cells = []
            for way in ways:
                pair = [
                    float(np.exp((_choice(r, way, ends, count).windows - r.dense).mean())) for ends in (True, False)
                ]
                cells.append(" / ".join(dict.fromkeys(map(short, pair))))
            rows.append([r.name, count, *cells])
    return table(("model, text", "removed", *(f"`{way}`" for way in ways)), rows)


def _choice(result: ScalesOnOneText, way: str, ends: bool, count: int) -> Choice:
    return next(c for c in result.choices if (c.way, c.ends, len(c.removed)) == (way, ends, count))


def against(results: Sequence[ScalesOnOneText]) -> str:
    """The scales of a blend against the paper's, and each way with both ends kept against all layers free."""
    rows = []
    for name, own in groupby(results, key=lambda r: r.measured_on.model.name):
        cases = [(r, count) for r in own for count in COUNTS]
        for scale in list(SCALES)[1:]:
            way = f"blend, {scale}"
            pairs = [(_choice(r, way, True, n), _choice(r, PAPERS, True, n)) for r, n in cases]
            rows.append([name, f"`{way}`", f"`{PAPERS}`", *_counts(pairs)])
        for way in dict.fromkeys(c.way for c in results[0].choices):
            pairs = [(_choice(r, way, False, n), _choice(r, way, True, n)) for r, n in cases]
            rows.append([name, f"`{way}`, both ends kept", f"`{way}`", *_counts(pairs)])
    head = ["model", "this", "against", "same layers", "better", "worse", ALIKE, "perplexity / the other's"]
    return table(head, rows)


def _counts(pairs: Sequence[tuple[Choice, Choice]]) -> list[object]:
    """In how many removals both chose the same layers, how the others compare, and the quotients of perplexities."""
    other = [(a, b) for a, b in pairs if a.removed != b.removed]
    words = Counter(told(a, b) for a, b in other)
    over = [float(np.exp((a.windows - b.windows).mean())) for a, b in other]
    told_apart = [words[word] for word in ("better", "worse", ALIKE)]
    return [len(pairs) - len(other), *told_apart, span(over) if over else None]


main = on_each_text(measure, HERE)

if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
