"""Perplexity of what `best` has chosen, over what it has spent: does more of a search reach further? (no paper)

    python experiments/2_criteria/search_curve/run.py [--model MODEL] --text A.txt --unseen B.txt

`--criterion best` chooses seven layers on the beginning of `--text`, once with few tokens to check by and many forwards
to spend, once with more tokens. Each set that it held for the best on the way is scored on the beginning of `--unseen`,
beside the greedy oracle of goals on the same windows. Writes curve.json and the figure beside this file, of another
model in a folder by its name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import typer

import lyapunov_prune as lp
from experiments.common import Model, Scored, draw, read_text, run_command
from experiments.statements import bullets, ratio, runs, short, table
from experiments.unseen import OnUnseenText
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.evaluation.perplexity import interval_of
from lyapunov_prune.ranking.best import best_removal
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.report.drawing import COLOURS, INK, one_panel, svg
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
GOALS = importlib.import_module("experiments.6_recovery.goals.run")
REMOVE = 7
SEARCHES = ((2048, 40.0), (4096, 30.0))  # tokens, half of which check, and forwards of that half


@dataclass(frozen=True)
class Step:
    """A set that was the best from so many forwards on, and its losses on the windows of the unseen text."""

    by: str
    layers: tuple[int, ...]
    forwards: float
    windows: np.ndarray


@dataclass(frozen=True)
class Course:
    """One search on `tokens`; `checks` sets were tried for `forwards` in all."""

    tokens: int
    checks: int
    forwards: float
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class SearchCurve(OnUnseenText):
    oracle: np.ndarray
    courses: tuple[Course, ...]

    DONE: ClassVar[str] = "chosen on the beginning of"


def main(
    text: Annotated[str, typer.Option(help="to choose on; that of goals")],
    unseen: Annotated[str, typer.Option(help="to score on; that of goals")],
    model: Model = Model(),
    context: int = 512,
    scored: Scored = 8192,
) -> None:
    loaded = model.load()
    judged = read_text(loaded, unseen, scored, 2 * context, "all")
    goals = GOALS.GoalsOnOneText.load(GOALS.HERE / f"{loaded.model.config._name_or_path}-{Path(text).stem}.json")
    if goals.measured_on.text_hash != judged.text_hash:
        raise lp.LyapunovPruneError("goals has scored its oracle on another text; give that as --unseen")
    batches = {n: read_text(loaded, text, n, context // 2, "all") for n, _ in SEARCHES}  # `best` needs eight windows
    longest = batches[max(batches)]
    require_disjoint(longest, judged)
    origins, jobs = (longest.measured_on(loaded.model), judged.measured_on(loaded.model)), model.jobs
    courses = []
    with Store(jobs / "search-curve", "search curve", {"texts": encode(origins)}) as store:
        for tokens, search in SEARCHES:
            folder = jobs / f"search-curve-{tokens}"
            found = best_removal(loaded.model, batches[tokens], REMOVE, search=search, folder=folder)
            steps = []
            for number in held(found):
                tried = found.tried[number]
                key = ",".join(map(str, tried.layers))
                if key not in store:
                    cut = lp.remove_layers(loaded.model, tried.layers)
                    store.add(key, lp.perplexity(cut, judged, description=key).windows.tolist())
                steps.append(Step(tried.by, tried.layers, tried.forwards, np.array(store[key])))
            courses.append(Course(tokens, len(found.tried), found.tried[-1].forwards, tuple(steps)))
    result = SearchCurve(goals.dense, *origins, goals.oracle.windows, tuple(courses))
    folder = model.folder(HERE)
    result.save(folder / "curve.json")
    draw(folder, {"curve": figure(result)})


def held(found: BestRemoval) -> list[int]:
    """The tried sets that were the best in turn: those whose loss is less than that of all before."""
    losses = [float(tried.windows.mean()) for tried in found.tried]
    return [number for number, loss in enumerate(losses) if loss < min(losses[:number], default=np.inf)]


def figure(found: SearchCurve) -> str:
    page, axes = one_panel(6.5, 3.6)
    for course, colour in zip(found.courses, (COLOURS["blend"], COLOURS["rho"]), strict=True):
        over = [step.windows - found.oracle for step in course.steps]
        middle = np.array([np.exp(o.mean()) for o in over])
        bars = np.abs(np.array([interval_of(o) for o in over]).T - middle)
        spent = [step.forwards for step in course.steps]
        label = f"{course.tokens // 2:,} tokens to check by"
        axes.errorbar(spent, middle, yerr=bars, marker="o", markersize=4, capsize=2, linestyle="", color=colour)
        axes.step([*spent, course.forwards], [*middle, middle[-1]], where="post", color=colour, label=label)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--", label="greedy oracle")
    axes.axhline(GOALS.GOALS["cut"], color=INK, linewidth=0.8, linestyle=":", label="goal")
    axes.set(xlabel="forwards spent, of the tokens to check by", ylabel="perplexity / oracle's")
    axes.legend(frameon=False, fontsize=8)
    return svg(page)


def written(folder: Path = HERE) -> dict[str, str]:
    found = SearchCurve.load(folder / "curve.json")
    return {"setting": setting(found), "steps": steps_of(found), "courses": courses(found)}


def setting(found: SearchCurve) -> str:
    return bullets(f"{found.setting()}, the oracle's {ratio(found.oracle)}")


def steps_of(found: SearchCurve) -> str:
    rows = [
        (course.tokens // 2, short(step.forwards), step.by, runs(step.layers), ratio(step.windows), _over(found, step))
        for course in found.courses
        for step in course.steps
    ]
    return table(("tokens to check by", "forwards", "by", "removed", "perplexity", "/ oracle's"), rows)


def _over(found: SearchCurve, step: Step) -> str:
    return ratio(step.windows - found.oracle)


def courses(found: SearchCurve) -> str:
    """What each search spent, and how near it came to the oracle."""
    rows: list[list[object]] = []
    for course in found.courses:
        over = [float(np.exp((step.windows - found.oracle).mean())) for step in course.steps]
        last = _over(found, course.steps[-1])
        rows.append([course.tokens // 2, course.checks, course.forwards, len(course.steps), min(over), last])
    head = ("tokens to check by", "sets", "forwards", "best in turn", "least / oracle's", "at last / oracle's")
    return table(head, rows)


if __name__ == "__main__":
    run_command(main, HERE / "curve.json", written)
