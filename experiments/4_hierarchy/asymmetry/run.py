"""Do attentions and activations that are removed recover differently, and is it the optimizer that does it (Prop. 5)?

    python experiments/4_hierarchy/asymmetry/run.py [--model MODEL --text FILE] [--reduction NAME --again]

Each type alone at several depths, with several seeds, by AdamW and by SGD, which does not normalise the size of a
gradient: the drop at once, the steps that regain half of it, the gap at the end. Both types learn from the same items
and are scored on the same. Writes asymmetry.json and asymmetry.svg beside this file, of another model in a folder by
its name, with a --reduction asymmetry-NAME; what they say goes into README.md by `make tables`. Killed at any moment
it goes on with the recovery that it was in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from scipy import stats

from experiments.common import Model, draw, of_model, run_command
from experiments.images import VIT
from experiments.statements import bullets, counted, interval, percent, short, table
from experiments.taught import Taught, numbers, taught
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation import score
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.healing.trained import drawn_order
from lyapunov_prune.joint import Importance, RecoveryRecipe
from lyapunov_prune.joint.recovery import Lesson, recover
from lyapunov_prune.progress import track
from lyapunov_prune.report.drawing import COLOURS, log_axis, panels, svg
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
FILE = "asymmetry.json"
TYPES = ("attention", "activation")
LABELS = {"adamw": "AdamW", "sgd": "SGD"}
DRAWS = 2000  # of items, for the interval of a quotient of steps


@dataclass(frozen=True)
class Curve:
    """Scores on the selection slice after as many steps as `marks` of the result says."""

    optimizer: str
    rate: float
    kind: str
    removed: int
    seed: int
    scores: np.ndarray


@dataclass(frozen=True)
class Paired:
    """Of `quantity` both types at one depth, or over all of them (`removed` 0), and what is between them.

    `drop` and `gap` are in score and `between` is activation less attention. `steps` regain half of the drop, and
    `between` is attention over activation. `low` and `high` are a 95 % interval, paired by item.
    """

    quantity: str
    optimizer: str
    removed: int
    attention: float
    activation: float
    between: float
    low: float
    high: float


@dataclass(frozen=True)
class Asymmetry(Result):
    """`dense` is the score of the whole model. `probes` chose the rates: `curves` that went by other rates.

    `reduction` is what takes the place of a removed activation.
    """

    layers: int
    reduction: str
    dense: float
    marks: np.ndarray
    seeds: int
    rates: dict[str, tuple[float, ...]]
    chosen: dict[str, float]
    curves: tuple[Curve, ...]
    probes: tuple[Curve, ...]
    paired: tuple[Paired, ...]
    measured_on: tuple[MeasuredOn, ...]

    def of(self, quantity: str, optimizer: str = "") -> list[Paired]:
        """By depth, and last over all of them."""
        rows = [p for p in self.paired if (p.quantity, p.optimizer) == (quantity, optimizer)]
        return sorted(rows, key=lambda p: p.removed or self.layers + 1)

    def mean_curve(self, optimizer: str, kind: str, removed: int) -> np.ndarray:
        """(marks,), over seeds."""
        return np.mean(
            [c.scores for c in self.curves if (c.optimizer, c.kind, c.removed) == (optimizer, kind, removed)], 0
        )


def main(
    model: Model = Model(VIT),
    text: str = "builtin",
    tokens: int = 40960,
    depths: str = "4,6,8,10,11,12",
    steps: int = 24,
    seeds: int = 2,
    adamw: str = "1e-4,3e-4,1e-3",
    sgd: str = "0.03,0.1,0.3",
    reduction: Annotated[str | None, typer.Option(help="in place of an activation")] = None,
) -> None:
    rates = {"adamw": tuple(numbers(adamw, "--adamw")), "sgd": tuple(numbers(sgd, "--sgd"))}
    removed = tuple(int(n) for n in numbers(depths, "--depths"))
    given = taught(model, text, tokens, reduction)
    if max(removed) > min(given.most):
        raise LyapunovPruneError(f"--depths {depths!r}: of one type {min(given.most)} can go at most")
    if steps < 2 or seeds < 2:
        raise LyapunovPruneError(f"{steps} steps, {seeds} seeds: nothing to compare; give two or more of each")
    found = measure(given, removed, steps, seeds, rates)
    folder, name = of_model(HERE, model.name, VIT), f"asymmetry-{reduction}" if reduction else "asymmetry"
    found.save(folder / f"{name}.json")
    draw(folder, {name: figure(found)})


def marks_of(steps: int) -> np.ndarray:
    """0, powers of two, and the end."""
    return np.array([0, *(2**i for i in range(steps.bit_length()) if 2**i < steps), steps])


def measure(
    given: Taught, depths: tuple[int, ...], steps: int, seeds: int, rates: dict[str, tuple[float, ...]]
) -> Asymmetry:
    """The rate of each optimizer is that of the best score at the end, as a mean over both types at a middle depth."""
    marks, middle = marks_of(steps), depths[len(depths) // 2]
    with Store(given.jobs / "asymmetry", "asymmetry", {**given.about(), "steps": steps}) as store:
        worth = given.importance(store)

        def items(optimizer: str, rate: float, kind: str, n: int, seed: int) -> np.ndarray:
            """(marks, m): the items' scores along one recovery."""
            key = f"{optimizer}-{rate:g}-{kind}-{n}-{seed}"
            if key not in store:
                store.add(key, recovered(given, worth, optimizer, rate, kind, n, seed, marks).tolist())
            return np.stack([uncut(given, worth, store, kind, n), *np.array(store[key])])

        def curve(optimizer: str, rate: float, kind: str, n: int, seed: int) -> Curve:
            return Curve(optimizer, rate, kind, n, seed, items(optimizer, rate, kind, n, seed).mean(1))

        probes = [
            curve(name, rate, kind, middle, 0) for name, tried in rates.items() for rate in tried for kind in TYPES
        ]
        chosen = {name: best_rate(probes, name) for name in rates}
        jobs = [(n, seed, name, kind) for n in depths for seed in range(seeds) for name in rates for kind in TYPES]
        all_items = {
            (name, kind, n, seed): items(name, chosen[name], kind, n, seed)
            for n, seed, name, kind in track(jobs, "recoveries")
        }
        dense = uncut(given, worth, store, "attention", 0)
    by_type = {
        (name, kind, n): np.mean([all_items[name, kind, n, seed] for seed in range(seeds)], 0)
        for name in rates
        for kind in TYPES
        for n in depths
    }
    return Asymmetry(
        layers=given.layers,
        reduction=given.student.reduction,
        dense=float(dense.mean()),
        marks=marks,
        seeds=seeds,
        rates=rates,
        chosen=chosen,
        curves=tuple(
            Curve(name, chosen[name], kind, n, seed, rows.mean(1)) for (name, kind, n, seed), rows in all_items.items()
        ),
        probes=tuple(c for c in probes if c.rate != chosen[c.optimizer]),
        paired=tuple(comparisons(dense, by_type, marks)),
        measured_on=tuple(part.measured_on(given.model) for part in (given.data.learn, given.data.select)),
    )


def best_rate(probes: list[Curve], optimizer: str) -> float:
    ends: dict[float, list[float]] = {}
    for c in probes:
        if c.optimizer == optimizer:
            ends.setdefault(c.rate, []).append(c.scores[-1])
    return max(ends, key=lambda rate: float(np.mean(ends[rate])))


def uncut(given: Taught, worth: Importance, store: Store, kind: str, n: int) -> np.ndarray:
    """(m,): the items' scores before any recovery; of the dense model without `n`."""
    key = f"before-{kind}-{n}"
    if key not in store:
        with given.student.cut(*gone(worth, kind, n)) as model:
            store.add(key, score(model, given.data.select, batch_size=8 * given.batch).items.tolist())
    return np.array(store[key])


def gone(worth: Importance, kind: str, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return worth.first(n, 0) if kind == "attention" else worth.first(0, n)


def recovered(
    given: Taught, worth: Importance, optimizer: str, rate: float, kind: str, n: int, seed: int, marks: np.ndarray
) -> np.ndarray:
    """(marks but the first, m). All weights of the layers learn, both types from the same items."""
    order = tuple(drawn_order(len(given.data.learn), int(marks[-1]) * given.batch, seed))
    lesson = Lesson(f"{n} {kind}s by {optimizer} at {rate:g}, seed {seed}", *gone(worth, kind, n), order, seed)
    student = copy.deepcopy(given.student)
    rows: list[np.ndarray] = []

    def watch(step: int) -> None:
        if step in marks:
            rows.append(score(student.model, given.data.select, batch_size=8 * given.batch).items)

    recipe = RecoveryRecipe(batch=given.batch, learning_rate=rate, optimizer=optimizer)
    recover(student, given.model, given.data.learn, lesson, recipe, TrainingState(None, {}), watch)
    return np.stack(rows)


def comparisons(
    dense: np.ndarray, by_type: dict[tuple[str, str, int], np.ndarray], marks: np.ndarray
) -> Iterator[Paired]:
    """Both types at every depth and over all: `dense` (m,), and by optimizer, type and depth items (marks, m)."""
    optimizers, depths = dict.fromkeys(key[0] for key in by_type), sorted({key[2] for key in by_type})

    def lost(name: str, place: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """By depth what each item has lost, of both types."""
        a, g = ({n: dense - by_type[name, kind, n][place] for n in depths} for kind in TYPES)
        return {n: (a[n], g[n]) for n in depths}

    def differences(quantity: str, name: str, of: dict[int, tuple[np.ndarray, np.ndarray]]) -> Iterator[Paired]:
        means = tuple(np.mean([pair[i] for pair in of.values()], 0) for i in (0, 1))
        for n, (a, g) in {**of, 0: means}.items():
            yield Paired(quantity, name, n, float(a.mean()), float(g.mean()), *by_item(g - a))

    yield from differences("drop", "", lost(next(iter(optimizers)), 0))
    for name in optimizers:
        yield from differences("gap", name, lost(name, -1))
        yield from faster(name, dense, {n: tuple(by_type[name, kind, n] for kind in TYPES) for n in depths}, marks)


def by_item(d: np.ndarray) -> tuple[float, float, float]:
    """Mean and Student's 95 % interval over items."""
    half = stats.t.ppf(0.975, len(d) - 1) * stats.sem(d)
    return float(d.mean()), float(d.mean() - half), float(d.mean() + half)


def faster(
    optimizer: str, dense: np.ndarray, pairs: dict[int, tuple[np.ndarray, ...]], marks: np.ndarray
) -> Iterator[Paired]:
    """Steps of attentions over those of activations to half of each one's drop, and their geometric mean over depths.

    Depths alone at which both types lose more than nothing, by the 95 % interval, as else half of it is half of noise,
    and at which a type regains half, as else nothing is known of the quotient. Intervals: the 95 % that lie in the
    middle when the same items are resampled for both types, all marks and depths.
    """
    m = len(dense)
    drawn = np.random.default_rng(0).multinomial(m, np.full(m, 1 / m), DRAWS) / m
    weights = np.vstack([np.full(m, 1 / m), drawn])
    logs = []
    for n, curves in pairs.items():
        if any(by_item(dense - curve[0])[1] <= 0 for curve in curves):
            continue
        a, g = (half_regained(weights @ dense, weights @ curve.T, marks) for curve in curves)
        if min(a[0], g[0]) >= marks[-1]:
            continue
        logs.append(np.log(a / g))
        yield Paired("steps", optimizer, n, float(a[0]), float(g[0]), *middle_of(logs[-1]))
    if logs:
        yield Paired("steps", optimizer, 0, np.nan, np.nan, *middle_of(np.mean(logs, 0)))


def middle_of(logs: np.ndarray) -> tuple[float, float, float]:
    """Of logarithms the first, and between which the middle 95 % of the others lie."""
    low, high = np.quantile(logs[1:], [0.025, 0.975])
    return float(np.exp(logs[0])), float(np.exp(low)), float(np.exp(high))


def half_regained(dense: np.ndarray, scores: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """(…,): after how many steps scores (…, marks) have first regained half of what was lost of `dense` (…,).

    On a straight line between marks. Not below one step; what has not regained it counts as all of the steps.
    """
    aim = (dense + scores[..., 0]) / 2
    reached = scores[..., 1:] >= aim[..., None]
    place = np.where(reached.any(-1), reached.argmax(-1), len(marks) - 2)
    before, after = (np.take_along_axis(scores, (place + i)[..., None], -1)[..., 0] for i in (0, 1))
    share = np.where(reached.any(-1), (aim - before) / np.where(after != before, after - before, 1.0), 1.0)
    return np.maximum(marks[place] + np.clip(share, 0, 1) * (marks[place + 1] - marks[place]), 1.0)


def over_seeds(found: Asymmetry, optimizer: str, quantity: str) -> tuple[float, float, float]:
    """What `Paired` gives of `gap` and `steps` over all depths, with its 95 % interval over seeds."""
    steps = quantity == "steps"
    depths = [p.removed for p in (known(found, optimizer) if steps else found.of(quantity, optimizer)) if p.removed]
    value = {
        (c.kind, c.removed, c.seed): float(np.log(half_regained(np.array(found.dense), c.scores, found.marks)))
        if steps
        else found.dense - c.scores[-1]
        for c in found.curves
        if c.optimizer == optimizer
    }
    less, more = ("activation", "attention") if steps else TYPES
    d = [[value[more, n, s] - value[less, n, s] for s in range(found.seeds)] for n in depths]
    middle, low, high = pooled(np.array(d))
    return (float(np.exp(middle)), float(np.exp(low)), float(np.exp(high))) if steps else (middle, low, high)


def pooled(d: np.ndarray) -> tuple[float, float, float]:
    """Mean of d (depths, seeds) and its 95 % interval by the variance within depths."""
    freedom = d.shape[0] * (d.shape[1] - 1)
    half = stats.t.ppf(0.975, freedom) * np.sqrt(d.var(1, ddof=1).mean() / d.size)
    return float(d.mean()), float(d.mean() - half), float(d.mean() + half)


def figure(found: Asymmetry) -> str:
    """The score along the recoveries at the depths in the middle and at the end, by optimizer."""
    depths = sorted({c.removed for c in found.curves})
    shown = dict.fromkeys((depths[len(depths) // 2], depths[-1]))
    drawn, axes = panels(6.5, 2.6 * len(found.chosen), len(found.chosen))
    for name, ax in zip(found.chosen, axes, strict=True):
        for kind, colour in zip(TYPES, (COLOURS["rho"], COLOURS["bi"]), strict=True):
            for n, line in zip(shown, ("-", "--"), strict=False):
                label = f"{counted(n, kind)} removed"
                # 0 has no place on a logarithmic axis; it stands at a half.
                ax.plot(
                    np.maximum(found.marks, 0.5),
                    found.mean_curve(name, kind, n),
                    f"o{line}",
                    color=colour,
                    markersize=3,
                    label=label,
                )
        ax.axhline(found.dense, color=COLOURS["random"], linewidth=1)
        ax.set_ylabel(f"score, {LABELS[name]}")
        log_axis(ax, "x")
    axes[0].legend(fontsize=8)
    axes[-1].set_xlabel("steps of recovery (the first point: none); grey: dense")
    return svg(drawn)


def written(folder: Path = HERE) -> dict[str, str]:
    """Of every file; what is of another reduction than the first is named by it."""
    parts: dict[str, str] = {}
    for path in sorted(folder.glob("asymmetry*.json")):
        found, name = Asymmetry.load(path), path.stem.removeprefix("asymmetry").removeprefix("-")
        tables = {
            "setting": setting(found),
            "drop": drops(found),
            "steps": by_steps(found),
            "regained": regained(found),
        }
        parts |= {f"{name} {part}".strip(): text for part, text in tables.items()}
    return parts


def unit(found: Asymmetry) -> str:
    return "of top-1 accuracy" if found.measured_on[1].images else "nats a token"


def between(x: tuple[float, float, float]) -> str:
    """`0.12 (−0.01 to 0.2)`."""
    return f"{short(x[0])} ({short(x[1])} to {short(x[2])})".replace("-", "−")


def setting(found: Asymmetry) -> str:
    learnt, selected = found.measured_on
    lines = [
        f"learnt from {learnt.line()}; scored on {selected.line()}: dense {short(found.dense)}",
        f"{found.marks[-1]} steps, {counted(found.seeds, 'seed')} of the items' order, all weights of the layers; "
        f"scored after {', '.join(map(str, found.marks))} steps; reduction {found.reduction}",
    ]
    for name, tried in found.rates.items():
        lines.append(
            f"{LABELS[name]} at a rate of {found.chosen[name]:g}, the best of {', '.join(f'{r:g}' for r in tried)} by "
            "the score at the end, as a mean over both types at a middle depth on the slice to select by"
            + (edge(found, name) if len(tried) > 1 else "")
        )
    return bullets(*lines)


def edge(found: Asymmetry, name: str) -> str:
    """Whether a rate outside of those tried could be better."""
    tried, chosen = found.rates[name], found.chosen[name]
    return "" if min(tried) < chosen < max(tried) else "; at the edge of those tried, so that another might be better"


def drops(found: Asymmetry) -> str:
    head = ("removed", "drop at once: attentions", "activations", "activation − attention, 95 % by item")
    return table(
        head, [(depth(p), p.attention, p.activation, between((p.between, p.low, p.high))) for p in found.of("drop")]
    )


def by_steps(found: Asymmetry) -> str:
    over_both = ("attention / activation, 95 % by item", "over seeds")
    head = ("optimizer", "removed", "steps to half: attentions", "activations", *over_both)

    def taken(steps: float) -> str:
        """The steps of one type; those of a type that never regains half are not known."""
        return f"{found.marks[-1]} or more" if steps >= found.marks[-1] else short(steps)

    rows: list[tuple[object, ...]] = []
    for name in found.chosen:
        depths = known(found, name)
        for p in found.of("steps", name):
            if p.removed:
                quotient = bound(found, [p]) + interval(p.between, p.low, p.high) if p in depths else None
                rows.append((LABELS[name], depth(p), taken(p.attention), taken(p.activation), quotient, None))
        if depths:
            over = bound(found, depths) + interval(*over_depths(found, name))
            _, low, high = over_seeds(found, name, "steps")
            rows.append((LABELS[name], "all these depths", None, None, over, f"{short(low)} to {short(high)}"))
    return table(head, rows)


def known(found: Asymmetry, optimizer: str) -> list[Paired]:
    """The depths at which one type regains half or both do; where neither does nothing is known of the quotient."""
    rows = [p for p in found.of("steps", optimizer) if p.removed]
    return [p for p in rows if min(p.attention, p.activation) < found.marks[-1]]


def slow(found: Asymmetry, depths: list[Paired]) -> list[str]:
    """The type of every recovery that ends before half is regained."""
    return [kind for kind in TYPES for p in depths if getattr(p, kind) >= found.marks[-1]]


def bound(found: Asymmetry, depths: list[Paired]) -> str:
    """What is said before a quotient of steps of which one was not seen to its end."""
    ends = set(slow(found, depths))
    return "at least " if ends == {"attention"} else "at most " if ends == {"activation"} else ""


def over_depths(found: Asymmetry, optimizer: str) -> tuple[float, float, float]:
    """The geometric mean of the quotients over the depths that are known, with its 95 % interval by item.

    NaN where other depths are in the interval that was kept.
    """
    *rows, whole = found.of("steps", optimizer)
    depths = known(found, optimizer)
    middle = float(np.exp(np.mean(np.log([p.between for p in depths]))))
    return (middle, whole.low, whole.high) if len(depths) == len(rows) else (middle, np.nan, np.nan)


def depth(p: Paired) -> str:
    return str(p.removed) if p.removed else "all depths"


def regained(found: Asymmetry) -> str:
    """The share of the mean drop that is regained in the end; the gap of activations less that of attentions there."""
    drop = found.of("drop")[-1]
    rows = []
    for name in found.chosen:
        gap = found.of("gap", name)[-1]
        shares = [
            percent(1 - getattr(gap, kind) / lost) if (lost := getattr(drop, kind)) > 0 else None for kind in TYPES
        ]
        rows.append((LABELS[name], *shares, between((gap.between, gap.low, gap.high))))
    head = ("optimizer", "regained: attentions", "activations", f"gap left, activation − attention, {unit(found)}")
    return table(head, rows)


if __name__ == "__main__":
    run_command(main, HERE / FILE, written)
