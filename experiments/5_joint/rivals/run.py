"""Was the map's choice the best of its budget? Chosen pair and rivals, recovered alike and scored at the end (MAP).

    python experiments/5_joint/rivals/run.py [--model MODEL] [--random 6]

Of the run of `joint` that joint/ holds: the chosen pair, both ends of the budget's line, the neighbours on it and
random others, each by a chain of its own, a part a point, and the final recovery; and the map fitted anew to scores
moved by noise. Writes rivals.json and rivals.svg; what they say goes into README.md by `make tables`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments.common import Model, draw, of_model, run_command
from experiments.images import VIT
from experiments.noisy_maps import noisy_choices
from experiments.recoveries import Subject, difference, finished, four, gained, spread, subject, together, told, unit
from experiments.statements import bullets, counted, percent, short, signed, table
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.joint.chains import Pair, chains
from lyapunov_prune.joint.points import Course
from lyapunov_prune.joint.result import JointRun
from lyapunov_prune.report.drawing import COLOURS, GREY, INK, panels, svg
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
REFITS = 500


@dataclass(frozen=True)
class Rivals(Result):
    """Pairs (m, 2) of a budget's line, what each is there for, and the final slice's items (m, seeds, n).

    `steps` (m, seeds) counts all that a pair took, its chain's and the final recovery's `last`; they are alike. `line`
    (k, 2) and `predicted` (k,) are all pairs of the budget; `refits` (2, k) the share of noisy maps that choose each,
    scores moved by `deviations` (over seeds, and around the map). `stated` is what `joint` found of the chosen pair,
    `bound` what it said that the choice can cost.
    """

    pairs: np.ndarray
    roles: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: np.ndarray
    last: int
    items: np.ndarray
    dense: np.ndarray
    line: np.ndarray
    predicted: np.ndarray
    deviations: tuple[float, float]
    refits: np.ndarray
    stated: float
    bound: float
    learnt_on: MeasuredOn
    measured_on: MeasuredOn

    def __post_init__(self) -> None:
        if len(np.unique(self.steps)) > 1:
            raise LyapunovPruneError(
                f"rivals took {self.steps.min()} to {self.steps.max()} steps; recover all of them alike"
            )
        if self.roles[0] != "chosen":
            raise LyapunovPruneError("the first of the rivals is the chosen pair; put it there")

    @property
    def scores(self) -> np.ndarray:
        """(m,), means over seeds."""
        return self.items.mean((1, 2))


def main(
    model: Model = Model(VIT, "cpu", "float32"),
    text: str = "builtin",
    tokens: int = 40960,
    context: int = 256,
    random: int = 1,
    seeds: int = 3,
    steps: int | None = None,
) -> None:
    given = subject(model, text, tokens, context)
    found = measure(given, random, seeds, steps)
    folder = of_model(HERE, model.name, VIT)
    found.save(folder / "rivals.json")
    draw(folder, {"rivals": figure(found)})


def measure(of: Subject, random: int, seeds: int, steps: int | None) -> Rivals:
    run = finished(of)
    chosen = rivals(run, random)
    last = steps or len(run.losses)
    student = of.student(run.importance.reduction)
    about = of.about() | {"importance": encode(run.importance), "recipe": encode(run.points.recipe)}
    about |= {"steps": [run.points.steps, last], "line": run.decision.pairs.tolist()}
    folder = of.jobs / "rivals"
    rows: dict[Pair, list[dict[str, Any]]] = {pair: [] for pair in chosen}
    with Store(folder, "rivals", about) as store:
        for seed in range(seeds):
            course = Course(
                student,
                of.data.learn,
                run.importance,
                parents(run, list(chosen)),
                run.points.steps,
                seed,
                run.points.recipe,
                folder / f"seed-{seed}",
                about,
            )
            for pair, row in zip(chosen, recovered(of, course, list(chosen), last, store), strict=True):
                rows[pair].append(row)
            course.forget()
        if "dense" not in store:
            store.add("dense", of.scored(of.model))
        dense = store["dense"]
    decision = run.decision
    around = decision.residual[0]
    deviations = (decision.over_seeds[0], around) if decision.over_seeds[1] else (around, around)
    return Rivals(
        pairs=np.array(list(chosen)),
        roles=tuple(chosen.values()),
        seeds=tuple(range(seeds)),
        steps=np.array([[row["steps"] for row in rows[pair]] for pair in chosen]),
        last=last,
        items=together([rows[pair] for pair in chosen], of.final),
        dense=together([[dense]], of.final)[0, 0],
        line=decision.pairs,
        predicted=decision.predicted,
        deviations=deviations,
        refits=np.stack([noisy_choices(run.map, decision, d, refits=REFITS) for d in deviations]),
        stated=run.chosen,
        bound=decision.regret,
        learnt_on=of.data.learn.measured_on(of.model),
        measured_on=of.final,
    )


def rivals(run: JointRun, random: int) -> dict[Pair, str]:
    """The chosen pair first, the ends of the line, the neighbours, and so many of the others, drawn; each once."""
    line = [(a, g) for a, g in run.decision.pairs.tolist()]
    place = run.decision.best
    found = {line[place]: "chosen"}
    named = [(0, "end"), (len(line) - 1, "end"), (place - 1, "neighbour"), (place + 1, "neighbour")]
    for at, role in named:
        if 0 <= at < len(line):
            found.setdefault(line[at], role)
    others = [pair for pair in line if pair not in found]
    drawn = np.random.default_rng(0).permutation(len(others))[:random]
    return found | {others[at]: "random" for at in sorted(drawn)}


def parents(run: JointRun, pairs: list[Pair]) -> dict[Pair, Pair]:
    """The chains of the run's points, and from the nearest of them on to every pair, attentions first."""
    points = {(a, g) for a, g in run.points.pairs.tolist()}
    reach, most = max(a + g for a, g in points), (max(a for a, _ in points), max(g for _, g in points))
    found = chains(reach, most)
    for pair in pairs:
        at = max((p for p in [(0, 0), *found] if p[0] <= pair[0] and p[1] <= pair[1]), key=sum)
        while at != pair:
            nearer = (at[0] + 1, at[1]) if at[0] < pair[0] else (at[0], at[1] + 1)
            found.setdefault(nearer, at)
            at = nearer
    return found


def recovered(of: Subject, course: Course, pairs: list[Pair], last: int, store: Store) -> Iterator[dict[str, Any]]:
    """Each pair learns what its chain teaches, then for `last` steps more, and is scored on the final slice."""
    learnt: set[Pair] = set()
    for pair in pairs:
        name = f"final-{pair[0]}-{pair[1]}"
        key = f"{name}-{course.seed}"
        if key not in store:
            taken = 0
            for point in course.lineage(pair):
                if point not in learnt:
                    course.learn_point(point, course.seed)
                    learnt.add(point)
                taken += course.steps
            student, lesson, losses = course.finish(pair, pair, last, name=name)
            with student.cut(lesson.attention, lesson.activation) as model:
                store.add(key, {**of.scored(model), "steps": taken + len(losses)})
            course.drop(name, lesson)
        yield store[key]


def figure(found: Rivals) -> str:
    drawn, (above, below) = panels(6.5, 5.0, 2)
    above.plot(found.line[:, 0], found.predicted, "-", color=GREY, linewidth=0.9, label="map, selection slice")
    for row, (a, _), role in zip(found.items.mean(-1), found.pairs, found.roles, strict=True):
        colour = COLOURS["bi"] if role == "chosen" else COLOURS["rho"]
        above.plot([a] * len(row), row, "o", markersize=3, color=colour)
        above.plot(a, row.mean(), "_", markersize=14, color=colour)
    above.plot([], [], "o", markersize=3, color=COLOURS["bi"], label="chosen, final slice, by seed")
    above.plot([], [], "o", markersize=3, color=COLOURS["rho"], label="rivals")
    above.axhline(found.dense.mean(), color=INK, linewidth=0.8, linestyle="--", label="dense")
    above.set_ylabel("score after recovery")
    above.legend(frameon=False, fontsize=8)
    for shift, shares, name, colour in zip(
        (-0.2, 0.2), found.refits, ("noise over seeds", "noise around the map"), ("blend", "from-end"), strict=True
    ):
        below.bar(found.line[:, 0] + shift, shares, 0.4, color=COLOURS[colour], label=name)
    below.set_ylabel(f"share of {REFITS} refits")
    below.set_xlabel("attentions removed")
    below.legend(frameon=False, fontsize=8)
    return svg(drawn)


def written(folder: Path = HERE) -> dict[str, str]:
    found = Rivals.load(folder / "rivals.json")
    return {"setting": setting(found), "rivals": by_rival(found), "refits": by_refit(found), **numbers(found)}


def setting(found: Rivals) -> str:
    return bullets(
        f"Learnt from {found.learnt_on.line()}; scored on {found.measured_on.line()}",
        f"{int(found.steps[0, 0])} steps each, of which {found.last} in the final recovery; "
        f"{counted(len(found.seeds), 'seed')}",
    )


def by_rival(found: Rivals) -> str:
    predicted = {(a, g): p for (a, g), p in zip(found.line.tolist(), found.predicted, strict=True)}
    rows = []
    for place in np.argsort(-found.scores, kind="stable"):
        a, g = found.pairs[place].tolist()
        items = found.items[place]
        less = "—" if place == 0 else gained(difference(found.items[0], items))
        score = f"{four(items.mean())} ({spread(items)})"
        rows.append((a, g, found.roles[place], four(predicted[a, g]), score, less))
    head = ("attentions", "activations", "", "predicted", "final slice (seeds)", "chosen less this, 95 %")
    return table(head, rows)


def by_refit(found: Rivals) -> str:
    head = ("attentions", "activations", *(f"chosen, noise {short(d)}" for d in found.deviations))
    rows = [(a, g, *map(percent, shares)) for (a, g), shares in zip(found.line.tolist(), found.refits.T, strict=True)]
    return table(head, rows)


def numbers(found: Rivals) -> dict[str, str]:
    """`regret`: the best measured less the choice, on the final slice."""
    lost = difference(found.items[int(found.scores.argmax())], found.items[0])
    beside = [told(difference(found.items[0], items)) for items in found.items[1:]]
    places = [found.line.tolist().index(pair) for pair in found.pairs.tolist()]
    rank = stats.spearmanr(found.predicted[places], found.scores)
    return {
        "regret": f"{gained(lost)} {unit(found.measured_on)}",
        "bound": short(found.bound),
        "count": str(len(beside)),
        "better": str(beside.count("better")),
        "worse": str(beside.count("worse")),
        "rank": f"{signed(float(rank.statistic))} (p {rank.pvalue:.2g})",
    }


if __name__ == "__main__":
    run_command(main, HERE / "rivals.json", written)
