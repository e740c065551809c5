"""The best of what all cheap criteria propose, checked and searched around, against each of them alone (`best`).

    python experiments/2_criteria/best/run.py [--model MODEL] --text builtin --text A.txt --text B.jsonl
    python experiments/2_criteria/best/run.py [--model MODEL] --text A.txt --unseen B.txt --tokens 8192 --context 1024

Layers are chosen on one half of a text, of which `best` keeps every second window from all scores; perplexity is
measured on the other half, or on the text `--unseen`. Writes MODEL-TEXT.json beside this file, one a text; what all of
them say goes into README.md by `make tables`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

import lyapunov_prune as lp
from experiments.all import rankings
from experiments.common import Each, Inputs, Model, inputs, run, show
from experiments.statements import bullets, counted, ratio, short, span, table
from experiments.unseen import OnUnseenText

HERE = Path(__file__).parent
SINGLE = ("bi", "rho", "rho, token pooling", "blend", "angular")
COUNTS = (2, 4, 7)


@dataclass(frozen=True)
class Choice:
    """The layers chosen by `criterion` (of `best` after `tried` sets), and the loss of each window without them."""

    criterion: str
    removed: tuple[int, ...]
    windows: np.ndarray
    tried: int
    forwards: float


@dataclass(frozen=True)
class BestOnOneText(OnUnseenText):
    """Of every criterion and number of layers: its choice. `first` is the best of the proposed sets, not searched."""

    choices: tuple[Choice, ...]
    search: float

    @property
    def text(self) -> str:
        """The text, or what was chosen on and what judged."""
        on, judged = (Path(each.text).stem for each in (self.calibrated_on, self.measured_on))
        return judged if on == judged else f"{judged} by {on}"

    def of(self, criterion: str, count: int) -> Choice:
        return next(c for c in self.choices if c.criterion == criterion and len(c.removed) == count)

    def single(self, count: int) -> Choice:
        """The choice of the best single criterion, known only by the held-out loss."""
        return min((self.of(name, count) for name in SINGLE), key=lambda c: float(np.mean(c.windows)))


def main(
    model: Model = Model(),
    text: Each = None,
    tokens: int = 4096,
    context: int = 512,
    search: float = 20.0,
    unseen: str | None = None,
) -> None:
    for source in text or ["builtin"]:
        given = inputs(model, source, tokens, context, unseen=unseen)
        found = measure(given, search)
        found.save(HERE / f"{given.loaded.model.config._name_or_path}-{found.text.replace(' ', '-')}.json")
    show(written())


def measure(given: Inputs, search: float) -> BestOnOneText:
    order = rankings(given, given.profile())
    found = [(name, order[name].plan(count).remove, 0, 0.0) for count in COUNTS for name in SINGLE]
    for count in COUNTS:
        folder = given.jobs / f"best-{count}-{search:g}-{given.calibration.text_hash[:16]}"
        best = lp.ranking.best_removal(given.loaded.model, given.calibration, count, search=search, folder=folder)
        proposed = [tried for tried in best.tried if not tried.swap]
        first = min(proposed, key=lambda tried: tried.windows.mean())
        found.append(("first", first.layers, len(proposed), proposed[-1].forwards))
        found.append(("best", best.remove, len(best.tried), best.forwards))
    dense, losses = given.without(gone for _, gone, *_ in found)
    choices = tuple(Choice(name, gone, losses[gone], tried, forwards) for name, gone, tried, forwards in found)
    return BestOnOneText(dense, *given.origins, choices, search)


def written() -> dict[str, str]:
    results = BestOnOneText.all(HERE)
    singles = [quotient(r, count) for r in results for count in COUNTS]
    return {
        "setting": setting(results),
        "chosen": chosen(results),
        "over": over(results),
        "measured": "; ".join(measured_models(results)),
        "removals": str(len(singles)),
        "over the best single": span(singles),
        "median over the best single": short(float(np.median(singles))),
    }


def quotient(result: BestOnOneText, count: int, criterion: str | None = None) -> float:
    """Perplexity of `best` over that of a criterion, or over that of the one that turns out best."""
    other = result.of(criterion, count) if criterion else result.single(count)
    return float(np.exp((result.of("best", count).windows - other.windows).mean()))


def over(results: list[BestOnOneText]) -> str:
    """`best` over each criterion, a row a model."""
    rows = []
    for name, own in groupby(results, key=lambda r: r.measured_on.model.name):
        cases = [(r, count) for r in own for count in COUNTS]
        for other in (None, *SINGLE):
            values = [quotient(r, count, other) for r, count in cases]
            said = f"`{other}`" if other else "the best single one"
            rows.append([name, said, len(values), span(values), float(np.median(values))])
    return table(["model", "`best` over", "removals", "perplexity", "median"], rows)


def measured_models(results: list[BestOnOneText]) -> list[str]:
    """`gemma-3-270m on 1 text`: a model can have fewer texts than another."""
    names = [r.measured_on.model.name for r in results]
    return [f"{name} on {counted(names.count(name), 'text')}" for name in dict.fromkeys(names)]


def setting(results: list[BestOnOneText]) -> str:
    return bullets(
        *(f"{r.headline()}; {short(r.search)} forwards at the most; dense perplexity {ratio(r.dense)}" for r in results)
    )


def _name(result: BestOnOneText) -> str:
    return f"{result.measured_on.model.name}, {result.text}"


def chosen(results: list[BestOnOneText]) -> str:
    """Perplexity over that of the dense model, the best single criterion by name, and `best` over it."""
    rows = []
    for r in results:
        for count in COUNTS:
            best, first, single = r.of("best", count), r.of("first", count), r.single(count)
            rows.append(
                (
                    _name(r),
                    count,
                    *(float(np.exp((r.of(name, count).windows - r.dense).mean())) for name in SINGLE),
                    float(np.exp((first.windows - r.dense).mean())),
                    float(np.exp((best.windows - r.dense).mean())),
                    f"{ratio(best.windows - single.windows)} (`{single.criterion}`)",
                    best.forwards,
                )
            )
    head = ("model, text", "removed", *(f"`{name}`" for name in SINGLE), "checked", "`best`", "over the best single")
    return table((*head, "forwards"), rows)


if __name__ == "__main__":
    run(main)
