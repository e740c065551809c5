"""Is what a longer recovery adds the same for every pair, so that the fast map has the true optimum (Theorem 3)?

    python experiments/5_joint/constant_bias/run.py [--model MODEL --text FILE]

The points of a map are recovered fast, as `joint` does; five of them far apart also five times longer from the same
start, both with several seeds. Says whether `long − fast` varies, and which pair of the budget line the map puts first
before and after it is moved by what was measured. Writes bias.json and bias.svg beside this file, of another model in a
folder by its name; what they say goes into README.md by `make tables`. Killed at any moment it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments.common import Model, draw, of_model, run_command
from experiments.images import VIT
from experiments.statements import bullets, short, table
from experiments.taught import Taught, taught
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation import score
from lyapunov_prune.healing.trained import drawn_order
from lyapunov_prune.joint import JointMap, Points, RecoveryRecipe, fit_map
from lyapunov_prune.joint.chains import CHAINS, LEAST_REACH, Pair, chains, walk
from lyapunov_prune.joint.points import Course, recover_points
from lyapunov_prune.joint.recovery import recover
from lyapunov_prune.progress import track
from lyapunov_prune.report.drawing import COLOURS, panels, svg
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
FILE = "bias.json"
LONGER = 5
RANK = 8  # as `joint` has it


@dataclass(frozen=True)
class ConstantBias(Result):
    """Five pairs (P, 2) with seeds (P, S): scores `fast` and `long` on the selection slice.

    `covariance` (P, P) is that of the P means of `long − fast` over its items, which all pairs share. `points` are all
    that were recovered fast, of which `before` is the map; `after` is the map of the same moved by the plane through
    the five differences. `reduction` is what takes the place of a removed activation.
    """

    layers: int
    reduction: str
    reach: int
    pairs: np.ndarray
    fast: np.ndarray
    long: np.ndarray
    covariance: np.ndarray
    long_covariance: np.ndarray
    points: Points
    before: JointMap
    after: JointMap
    measured_on: tuple[MeasuredOn, ...]

    @property
    def bias(self) -> np.ndarray:
        """(P,): long less fast, over seeds."""
        return (self.long - self.fast).mean(1)

    @property
    def seeds(self) -> int:
        return self.fast.shape[1]


def main(
    model: Model = Model(VIT),
    text: str = "builtin",
    tokens: int = 40960,
    reach: int = 8,
    steps: int = 12,
    seeds: int = 3,
) -> None:
    if reach < LEAST_REACH or steps < 1 or seeds < 2:
        raise LyapunovPruneError(
            f"a reach of {reach}, {steps} steps, {seeds} seeds; give {LEAST_REACH}, 1 and 2 or more: one seed has no "
            "spread to hold a difference against"
        )
    given = taught(model, text, tokens)
    if reach > min(given.most):
        raise LyapunovPruneError(f"--reach {reach}: of one type {min(given.most)} can go at most")
    found = measure(given, reach, steps, seeds)
    folder = of_model(HERE, model.name, VIT)
    found.save(folder / FILE)
    draw(folder, {"bias": figure(found)})


def spread_out(reach: int, most: Pair) -> list[Pair]:
    """The ends of the four chains, which meet one budget, and of one of those between the axes the middle."""
    ends = [walk(chain, reach, most)[-1] for chain in CHAINS]
    return [*ends, walk(CHAINS[-1], reach // 2, most)[-1]]


def measure(given: Taught, reach: int, steps: int, seeds: int) -> ConstantBias:
    recipe = RecoveryRecipe(batch=given.batch, rank=RANK)
    about: dict[str, Any] = {**given.about(), "rank": RANK, "steps": steps, "reach": reach}
    folder, five = given.jobs / f"bias-{reach}-{steps}", spread_out(reach, given.most)
    with Store(folder, "constant bias", about) as store:
        worth = given.importance(store)
        parents = chains(reach, given.most)
        course = Course(given.student, given.data.learn, worth, parents, steps, 0, recipe, folder, about)
        points = recover_points(course, given.data.select, five, seeds, store, batch_size=8 * given.batch)
        fast = np.array([[of_point(points, pair, seed) for seed in range(seeds)] for pair in five])
        jobs = [(pair, seed) for pair in five for seed in range(seeds)]
        rows = [longer(given, course, store, pair, seed) for pair, seed in track(jobs, "longer recoveries")]
        course.forget()
    return compared(points, five, fast, np.reshape(rows, fast.shape), reach, given.student.reduction)


def of_point(points: Points, pair: Pair, seed: int) -> np.ndarray:
    """(m,): the items of one of the fast recoveries."""
    place = (points.pairs == pair).all(1) & (points.seeds == seed)
    return np.asarray(points.items[place.argmax()])


def longer(given: Taught, course: Course, store: Store, pair: Pair, seed: int) -> list[float]:
    """The items after LONGER times the steps from what the point before `pair` has learnt, as its fast recovery.

    The items that it learns from begin with those of the fast one.
    """
    key = f"long-{pair[0]}-{pair[1]}-{seed}"
    if key not in store:
        lesson, each = course.lesson(pair, seed), course.steps * given.batch
        before = (sum(pair) - 1) * each
        order = drawn_order(len(course.learn), before + LONGER * each, seed)[before:]
        lesson = replace(lesson, name=f"{lesson.name}, {LONGER} times longer", items=tuple(order))
        student = course.taught(course.parents[pair])
        with course.state(key, lesson) as state:
            recover(student, course.teacher, course.learn, lesson, course.recipe, state)
        with student.cut(lesson.attention, lesson.activation) as model:
            found = score(model, given.data.select, batch_size=8 * given.batch)
        store.add(key, found.items.tolist())
        course.drop(key, lesson)
    return list(store[key])


def compared(
    points: Points, five: list[Pair], fast: np.ndarray, long: np.ndarray, reach: int, reduction: str
) -> ConstantBias:
    """`fast` and `long` (P, S, m): what each item scores, by pair and seed."""
    layers, count = points.layers, fast.shape[-1]
    shares = points.pairs[points.first] / layers
    scores = points.scores[points.first]
    moved = scores + plane(np.array(five) / layers, (long - fast).mean((1, 2)), shares)
    return ConstantBias(
        layers=layers,
        reduction=reduction,
        reach=reach,
        pairs=np.array(five),
        fast=fast.mean(2),
        long=long.mean(2),
        covariance=np.cov((long - fast).mean(1)) / count,
        long_covariance=np.cov(long.mean(1)) / count,
        points=points,
        before=fit_map(shares.tolist(), scores.tolist(), measured_on=points.measured_on),
        after=fit_map(shares.tolist(), moved.tolist(), measured_on=points.measured_on),
        measured_on=points.measured_on,
    )


def plane(shares: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """`β₀ + β₁ r_a + β₂ r_g` by least squares of values (P,), at other shares."""
    X, Y = (np.column_stack([np.ones(len(r)), r]) for r in (shares, at))
    return np.asarray(Y @ np.linalg.lstsq(X, values, rcond=None)[0])


def intervals(d: np.ndarray, covariance: np.ndarray, items: int) -> tuple[np.ndarray, np.ndarray]:
    """95 % of the means of d (P, S) over seeds: by the items, which all seeds share, and by the seeds.

    The variance over seeds is pooled over pairs; degrees of freedom by Satterthwaite.
    """
    by_item, by_seed, freedom = covariance.diagonal(), recovery_variance(d), d.shape[0] * (d.shape[1] - 1)
    both = by_item + by_seed
    t = stats.t.ppf(0.975, both**2 / (by_item**2 / (items - 1) + by_seed**2 / freedom))
    return d.mean(1) - t * np.sqrt(both), d.mean(1) + t * np.sqrt(both)


def recovery_variance(d: np.ndarray) -> float:
    """Of a mean over the seeds of d (P, S): the variance within pairs, pooled, by the number of seeds."""
    return float(d.var(1, ddof=1).mean() / d.shape[1])


def varies(d: np.ndarray, covariance: np.ndarray) -> tuple[float, float]:
    """Whether the means of d (P, S) are equal: `χ² / (P − 1)` of their contrasts, and p by F(P − 1, P(S − 1)).

    The covariance of the means is that over items plus that over seeds. With the latter alone F is that of an analysis
    of variance; items that count too have more degrees of freedom, so that p is rather too large.
    """
    P, S = d.shape
    total = covariance + recovery_variance(d) * np.eye(P)
    C = np.eye(P)[1:] - np.eye(P)[:1]
    contrasts = C @ d.mean(1)
    statistic = float(contrasts @ np.linalg.solve(C @ total @ C.T, contrasts)) / (P - 1)
    return statistic, float(stats.f.sf(statistic, P - 1, P * (S - 1)))


def line(found: ConstantBias) -> np.ndarray:
    """The pairs that remove `reach`, with a attentions each."""
    a = np.arange(found.reach + 1)
    return np.column_stack([a, found.reach - a])


def optimum(found: ConstantBias, fitted: JointMap) -> Pair:
    """The pair of the budget line that a map puts first."""
    pairs = line(found)
    a, g = pairs[fitted.predict(pairs / found.layers).argmax()].tolist()
    return a, g


def lead(found: ConstantBias, fitted: JointMap, one: Pair, other: Pair) -> tuple[float, float]:
    """How far the map puts `one` before `other`, and half of the 95 % interval of that by the points around the map."""
    ends = np.array([one, other]) / found.layers
    deviation, freedom = fitted.residual
    half = stats.t.ppf(0.975, freedom) * deviation * 2 * np.sqrt(fitted.contrast(ends)[0])
    first, second = fitted.predict(ends)
    return float(first - second), float(half)


def figure(found: ConstantBias) -> str:
    drawn, (bias, maps) = panels(6.5, 5.4, 2)
    low, high = intervals(found.long - found.fast, found.covariance, len(found.points.items[0]))
    a = found.pairs[:, 0].astype(float)
    for place, (n_a, n_g) in enumerate(found.pairs.tolist()):
        colour = COLOURS["rho"] if n_a + n_g == found.reach else COLOURS["random"]
        bars = [[found.bias[place] - low[place]], [high[place] - found.bias[place]]]
        bias.errorbar(a[place], found.bias[place], bars, fmt="o", capsize=3, color=colour)
        bias.annotate(
            f"({n_a}, {n_g})", (a[place], found.bias[place]), xytext=(5, 3), textcoords="offset points", fontsize=8
        )
    bias.axhline(0, color=COLOURS["random"], linewidth=1)
    bias.set_ylabel("long − fast")
    pairs = line(found)
    on = found.pairs.sum(1) == found.reach
    for label, fitted, scores, colour in (
        ("fast", found.before, found.fast, COLOURS["rho"]),
        ("long", found.after, found.long, COLOURS["bi"]),
    ):
        maps.plot(pairs[:, 0], fitted.predict(pairs / found.layers), color=colour, label=f"{label}: map")
        maps.plot(a[on], scores.mean(1)[on], "o", color=colour, label=f"{label}: recovered")
    maps.set_ylabel("score")
    maps.set_xlabel(f"attentions removed; below, of {found.reach} parts removed")
    maps.legend(fontsize=8)
    return svg(drawn)


def written(folder: Path = HERE) -> dict[str, str]:
    found = ConstantBias.load(folder / FILE)
    return {"setting": setting(found), "bias": by_point(found), "optima": optima(found), **numbers(found)}


def unit(found: ConstantBias) -> str:
    return "of top-1 accuracy" if found.measured_on[1].images else "nats a token"


def number(x: float) -> str:
    return short(x).replace("-", "−")


def setting(found: ConstantBias) -> str:
    learnt, selected = found.measured_on
    points = found.points
    return bullets(
        f"learnt from {learnt.line()}; scored on {selected.line()}",
        f"{int(points.first.sum())} points of up to {found.reach} parts, {points.steps} steps each, the "
        f"{len(found.pairs)} below also {LONGER * points.steps} from the same start; "
        f"{found.seeds} seeds of each; updates of rank {RANK}; reduction {found.reduction}",
    )


def by_point(found: ConstantBias) -> str:
    low, high = intervals(found.long - found.fast, found.covariance, len(found.points.items[0]))
    rows = [
        (
            f"({a}, {g})",
            found.fast[i].mean(),
            found.long[i].mean(),
            f"{number(found.bias[i])} ({number(low[i])} to {number(high[i])})",
        )
        for i, (a, g) in enumerate(found.pairs.tolist())
    ]
    return table(("attentions and activations removed", "fast", "long", "long − fast, 95 %"), rows)


def optima(found: ConstantBias) -> str:
    """The maps' choices on the budget line, and the best of the pairs of it that were recovered for real."""
    on = np.flatnonzero(found.pairs.sum(1) == found.reach)
    rows = []
    for name, fitted, scores in (("fast", found.before, found.fast), ("long", found.after, found.long)):
        best = on[scores.mean(1)[on].argmax()]
        rows.append(
            (name, optimum(found, fitted), fitted.degree, tuple(found.pairs[best].tolist()), scores[best].mean())
        )
    return table(("recovery", "optimum of the map", "degree", "best of the recovered", "its score"), rows)


def numbers(found: ConstantBias) -> dict[str, str]:
    """`varies`: the test of one bias for all pairs; `trend`: the bias at the end of one axis less the other's."""
    d, (a, g) = found.long - found.fast, (0, 1)
    assert found.pairs[a, 1] == 0
    assert found.pairs[g, 0] == 0
    statistic, p = varies(d, found.covariance)
    v = found.covariance[a, a] + found.covariance[g, g] - 2 * found.covariance[a, g] + 2 * recovery_variance(d)
    half = stats.t.ppf(0.975, d.size - len(d)) * np.sqrt(v)
    return {
        "varies": f"F({d.shape[0] - 1}, {d.size - d.shape[0]}) = {short(statistic)}, p = {p:.2g}",
        "trend": f"{number(found.bias[a] - found.bias[g])} ± {number(half)} {unit(found)}",
    }


if __name__ == "__main__":
    run_command(main, HERE / FILE, written)
