"""`best`, which compares many sets on the beginnings of windows, against one that checked each on all. (no paper)

    python experiments/2_criteria/forwards/run.py --text A.txt --unseen B.txt --before OLD.json [--before OLD2.json ...]

OLD.json is what `lp.ranking.best_removal` of commit 2a1b8fc0, which compared no beginnings, chose on --text. Today's
chooses as many layers on the same windows, with each --search to spend. All choices are scored on the beginning of
--unseen. Writes MODEL-TEXT.json beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import typer

import lyapunov_prune as lp
from experiments.common import Model, Scored, plain, read_text, run_command
from experiments.statements import bullets, ratio, runs, short, table
from experiments.unseen import OnUnseenText
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.forward.reading import read
from lyapunov_prune.ranking.best import best_removal
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.sensitivity.sweep import Job, Sweep

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Choice:
    """What a search chose, `before` or not, and the mean loss of every window without it (nats)."""

    before: bool
    search: float
    forwards: float
    removed: tuple[int, ...]
    checked: float
    windows: np.ndarray


@dataclass(frozen=True)
class Forwards(OnUnseenText):
    """`choices` hold the mean loss on the check windows too (`checked`)."""

    choices: tuple[Choice, ...]

    DONE: ClassVar[str] = "chosen on the beginning of"


def main(
    text: Annotated[list[str], typer.Option(help="to choose on")],
    unseen: Annotated[str, typer.Option(help="to score on")],
    before: Annotated[list[str], typer.Option(help="results of the earlier search on --text")],
    model: Model = Model(),
    search: Annotated[list[float], typer.Option(help="forwards that today's may spend")] = [5.0, 20.0],  # noqa: B006
    context: int = 512,
    scored: Scored = 4096,
) -> None:
    loaded = model.load()
    judged = read_text(loaded, unseen, scored, context, "all")
    old = [BestRemoval.load(file) for file in before]
    reading = read(loaded, read_text(loaded, text[0], 4096, context))
    require_disjoint(reading.batch, judged)
    found: list[tuple[bool, BestRemoval]] = []
    for each in old:
        now = [best_removal(loaded, reading, len(each.remove), search=s, folder=model.jobs) for s in search]
        if each.checked_on.text_hash != now[0].checked_on.text_hash:
            raise lp.LyapunovPruneError(
                f"{each.checked_on.line()} of --before is another text than {now[0].checked_on}"
            )
        found += [(True, each), *((False, one) for one in now)]
    jobs = {one.remove: Job(",".join(map(str, one.remove)), min(one.remove), remove=one.remove) for _, one in found}
    with Sweep(loaded.model, judged, folder=model.jobs) as sweep:
        outcomes = sweep.run(jobs.values())
        dense = sweep.dense
    losses = {gone: outcomes[job.key].windows for gone, job in jobs.items()}
    choices = tuple(
        Choice(earlier, one.search, one.forwards, one.remove, _checked(one), losses[one.remove])
        for earlier, one in found
    )
    result = Forwards(dense, reading.measured_on(), judged.measured_on(loaded.model), choices)
    result.save(HERE / f"{loaded.model.config._name_or_path}-{Path(plain(text[0])).stem}.json")


def _checked(found: BestRemoval) -> float:
    return float(found.tried[found.chosen].windows.mean())


def written() -> dict[str, str]:
    results = Forwards.all(HERE)
    return {"setting": bullets(*(result.setting() for result in results)), "chosen": chosen(results)}


def chosen(results: list[Forwards]) -> str:
    rows: list[list[object]] = []
    for result in results:
        for choice in result.choices:
            first = next(c for c in result.choices if c.before and len(c.removed) == len(choice.removed))
            over = "" if choice.before else ratio(choice.windows - first.windows)
            how = "all tokens" if choice.before else "beginnings first"
            rows.append(
                [
                    Path(result.calibrated_on.text).stem,
                    how,
                    short(choice.search),
                    choice.forwards,
                    runs(choice.removed),
                    float(np.exp(choice.checked)),
                    ratio(choice.windows),
                    over,
                ]
            )
    head = ("chosen on", "sets compared on", "may spend", "forwards", "removed", "perplexity, used to choose")
    return table((*head, "perplexity, unseen", "over all tokens"), rows)


if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
