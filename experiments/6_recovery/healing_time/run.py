"""Perplexity over the minutes of mending and healing, for two, four and seven layers removed (§7, future work 4).

    python experiments/6_recovery/healing_time/run.py [--model MODEL] --text A.txt --unseen B.txt

Layers go by `angular`; the gaps are mended and the mended model healed on the beginning of `--text`, in runs of their
own by number of steps (the learning rate falls to zero in each), and scored on that of `--unseen`. Minutes are of
the processor, one thread, so that other work on the machine does not count. Writes minutes.json and the figure beside
this file, of another model in a folder by its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Learnt, Model, Scored, Unseen, draw, run_command
from experiments.statements import percent, ratio, runs, table
from experiments.unseen import OnUnseenText, settings, two_texts
from lyapunov_prune.evaluation.perplexity import interval_of
from lyapunov_prune.report.drawing import COLOURS, INK, log_axis, one_panel, svg
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
CRITERION = "angular"
COUNTS = (2, 4, 7)  # layers removed
STEPS = (10, 30, 90)  # of healing
STEP = 256  # tokens of one
Given = Callable[[], PreTrainedModel]
Make = Callable[[PreTrainedModel], PreTrainedModel]


@dataclass(frozen=True)
class Point:
    """Losses of the windows of the unseen text, and the seconds since the layers were chosen."""

    state: str
    steps: int
    seconds: float
    windows: np.ndarray


@dataclass(frozen=True)
class Course:
    """Cut, mended, and healed by more and more steps."""

    removed: tuple[int, ...]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class HealingTime(OnUnseenText):
    courses: tuple[Course, ...]

    DONE: ClassVar[str] = "chosen, mended and healed on"


def main(
    text: Learnt,
    unseen: Unseen,
    model: Model = Model(device="cpu"),
    tokens: int = 16384,
    context: int = 512,
    scored: Scored = 8192,
) -> None:
    torch.set_num_threads(1)  # what the processor spends is then what the work takes
    loaded = model.load()
    dense, folder = loaded.model, model.folder(HERE)
    learnt, judged, origins = two_texts(loaded, (text, tokens), (unseen, scored), context, 2 * context)
    with Store(model.jobs / "healing-time", "healing time", {"texts": encode(origins)}) as store:

        def once(
            state: str, removed: tuple[int, ...], make: Make, given: Given = lambda: dense, steps: int = 0
        ) -> Point:
            key = f"{state} {len(removed)} {steps}"
            if key not in store:
                start = given()
                before = time.process_time()
                made = make(start)
                seconds = time.process_time() - before
                store.add(key, {"seconds": seconds, "windows": lp.perplexity(made, judged).windows.tolist()})
            return Point(state, steps, store[key]["seconds"], np.array(store[key]["windows"]))

        whole = once("dense", (), lambda model: model)
        ranking = lp.rank(dense, learnt, criterion=CRITERION, remove=max(COUNTS))
        short_windows = replace(learnt, ids=learnt.ids.reshape(-1, STEP))
        courses = []
        for count in COUNTS:
            removed = ranking.plan(count).remove
            mend = cache(partial(lp.mend, dense, removed, learnt))
            points = [once("cut", removed, lambda model, gone=removed: lp.remove_layers(model, gone))]
            points.append(once("mended", removed, lambda _, mend=mend: mend()))
            for steps in STEPS:

                def heal(student: PreTrainedModel, steps: int = steps) -> PreTrainedModel:
                    return lp.heal(student, dense, short_windows, steps=steps).model

                healed = once("healed", removed, heal, mend, steps)
                points.append(replace(healed, seconds=points[1].seconds + healed.seconds))
            courses.append(Course(removed, tuple(points)))
    found = HealingTime(whole.windows, *origins, tuple(courses))
    found.save(folder / "minutes.json")
    draw(folder, {"minutes": figure(found)})


def figure(found: HealingTime) -> str:
    page, axes = one_panel(6.5, 3.6)
    for course, colour in zip(found.courses, (COLOURS["blend"], COLOURS["rho"], COLOURS["bi"]), strict=True):
        over = [p.windows - found.dense for p in course.points]
        middle = np.array([np.exp(o.mean()) for o in over])
        bars = np.abs(np.array([interval_of(o) for o in over]).T - middle)
        minutes = [p.seconds / 60 for p in course.points]
        label = f"{len(course.removed)} layers removed"
        axes.errorbar(minutes, middle, yerr=bars, marker="o", markersize=4, capsize=2, color=colour, label=label)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--", label="dense")
    log_axis(axes)
    axes.set(xlabel="minutes of one core since the layers were chosen", ylabel="perplexity / dense")
    axes.legend(frameon=False, fontsize=8)
    return svg(page)


def written(folder: Path = HERE) -> dict[str, str]:
    found = HealingTime.load(folder / "minutes.json")
    return {"setting": settings([found]), "minutes": perplexities(found)}


def perplexities(found: HealingTime) -> str:
    """`taken back`: the share of the loss in nats a token that the removal added."""
    rows = []
    for course in found.courses:
        cut = (course.points[0].windows - found.dense).mean()
        for p in course.points:
            over = p.windows - found.dense
            taken = percent(float(1 - over.mean() / cut))
            rows.append(
                (runs(course.removed), p.state, p.steps or "—", p.seconds / 60, ratio(p.windows), ratio(over), taken)
            )
    return table(("removed", "", "steps", "minutes of one core", "perplexity", "/ dense", "taken back"), rows)


if __name__ == "__main__":
    run_command(main, HERE / "minutes.json", written)
