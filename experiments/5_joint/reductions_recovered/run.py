"""What should stand for an activation: how much of the score each reduction costs, at once and after equal recovery.

    python experiments/5_joint/reductions_recovered/run.py [--model MODEL] [--remove 4 --remove 8]

The same layers lose their activation by every reduction that their blocks take, and learn for the same steps from the
same items. Writes reductions.json and reductions.svg; what they say goes into README.md by `make tables`.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from experiments.common import Model, draw, of_model, run_command
from experiments.images import VIT
from experiments.recoveries import Subject, difference, four, gained, spread, subject, together, told
from experiments.statements import bullets, counted, runs, table
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.healing.trained import drawn_order
from lyapunov_prune.joint.importance import Importance, measure_importance
from lyapunov_prune.joint.recovery import Lesson, recover
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.feedforward import find_feedforward
from lyapunov_prune.models.structure import find_layers
from lyapunov_prune.report.drawing import COLOURS, INK, panels, svg
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
REMOVED = (4, 8, 12)


@dataclass(frozen=True)
class Replaced:
    """By one reduction the activations of `layers`: items (n,) at once, and (seeds, n) after `steps` (seeds,)."""

    reduction: str
    layers: tuple[int, ...]
    steps: np.ndarray
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class ReductionsRecovered(Result):
    """Every reduction for every number of activations; the others are held against `default`, the plainest."""

    blocks: str  # plain or gated
    default: str
    replaced: tuple[Replaced, ...]
    dense: np.ndarray
    seeds: tuple[int, ...]
    learnt_on: MeasuredOn
    measured_on: MeasuredOn

    def __post_init__(self) -> None:
        steps = np.array([r.steps for r in self.replaced])
        if len(np.unique(steps)) > 1:
            raise LyapunovPruneError(f"reductions took {steps.min()} to {steps.max()} steps; recover all of them alike")
        for count in self.counts:
            if len({r.layers for r in self.replaced if len(r.layers) == count}) > 1:
                raise LyapunovPruneError(f"reductions replaced {count} activations of other layers; take the same")

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(len(r.layers) for r in self.replaced))

    @property
    def reductions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.reduction for r in self.replaced))

    def of(self, reduction: str, count: int) -> Replaced:
        return next(r for r in self.replaced if r.reduction == reduction and len(r.layers) == count)


def main(
    model: Model = Model(VIT, "cpu", "float32"),
    text: str = "builtin",
    tokens: int = 40960,
    context: int = 256,
    remove: Annotated[list[int] | None, typer.Option(help="How many activations go.")] = None,
    seeds: int = 4,
    steps: int = 100,
) -> None:
    given = subject(model, text, tokens, context)
    found = measure(given, tuple(remove or REMOVED), seeds, steps)
    folder = of_model(HERE, model.name, VIT)
    found.save(folder / "reductions.json")
    draw(folder, {"reductions": figure(found)})


def measure(of: Subject, removed: tuple[int, ...], seeds: int, steps: int) -> ReductionsRecovered:
    gated = find_feedforward(find_layers(of.model), 0).gated
    kind, default = ("gated", "mean-gate") if gated else ("plain", "identity")
    names = [name for name, entry in REDUCTIONS.items() if kind in entry.blocks]
    students = {name: of.student(name) for name in names}
    about = of.about() | {"steps": steps}
    with Store(of.jobs / "reductions_recovered", "reductions", about) as store:
        order = first_to_go(of, students, store)
        if "dense" not in store:
            store.add("dense", of.scored(of.model))
        rows = [
            replaced(of, name, student, tuple(sorted(order[:count])), seeds, steps, store)
            for count in removed
            for name, student in students.items()
        ]
        dense = together([[store["dense"]]], of.final)[0, 0]
    return ReductionsRecovered(
        blocks=kind,
        default=default,
        replaced=tuple(rows),
        dense=dense,
        seeds=tuple(range(seeds)),
        learnt_on=of.data.learn.measured_on(of.model),
        measured_on=of.final,
    )


def first_to_go(of: Subject, students: dict[str, Unmerged], store: Store) -> list[int]:
    """Layers by their places in the orders of importance of all reductions together: none chooses for the others."""
    places = np.zeros(len(next(iter(students.values())).blocks))
    for name, student in students.items():
        key = f"importance {name}"
        if key not in store:
            worth: Importance = measure_importance(student, of.data.learn, batch=of.recipe.batch)
            store.add(key, worth.activation.tolist())
        places += np.argsort(np.argsort(store[key], kind="stable"), kind="stable")
    return np.argsort(places, kind="stable").tolist()


def replaced(
    of: Subject, name: str, student: Unmerged, layers: tuple[int, ...], seeds: int, steps: int, store: Store
) -> Replaced:
    at_once = f"{name} {layers}"
    if at_once not in store:
        with student.cut((), layers) as model:
            store.add(at_once, of.scored(model))
    rows = [learnt(of, f"{at_once} seed {seed}", student, layers, seed, steps, store) for seed in range(seeds)]
    return Replaced(
        reduction=name,
        layers=layers,
        steps=np.array([row["steps"] for row in rows]),
        before=together([[store[at_once]]], of.final)[0, 0],
        after=together([rows], of.final)[0],
    )


def learnt(
    of: Subject, key: str, student: Unmerged, layers: tuple[int, ...], seed: int, steps: int, store: Store
) -> dict[str, Any]:
    """After `steps` of distillation from the dense weights, on the final slice."""
    if key not in store:
        recipe, folder = of.recipe, of.jobs / "reductions_recovered" / "state"
        items = drawn_order(len(of.data.learn), steps * recipe.batch, seed)
        lesson, pupil = Lesson(key, (), layers, tuple(items), seed), copy.deepcopy(student)
        with TrainingState(folder, {**of.about(), **vars(lesson)}) as state:
            losses = recover(pupil, of.model, of.data.learn, lesson, recipe, state)
            with pupil.cut((), layers) as model:
                store.add(key, {**of.scored(model), "steps": len(losses)})
            state.forget()
    return store[key]


def figure(found: ReductionsRecovered) -> str:
    drawn, axes = panels(6.5, 4.6, 2)
    for name, colour in zip(found.reductions, COLOURS.values(), strict=False):
        rows = [found.of(name, count) for count in found.counts]
        for panel, costs in zip(
            axes,
            ([difference(found.dense, r.before) for r in rows], [difference(found.dense, r.after) for r in rows]),
            strict=True,
        ):
            middle, low, high = np.array(costs).T
            bars = np.stack([middle - low, high - middle])
            panel.errorbar(found.counts, middle, yerr=bars, fmt="o-", markersize=4, capsize=2, color=colour, label=name)
    for panel, name in zip(axes, ("at once", "after recovery"), strict=True):
        panel.axhline(0, color=INK, linewidth=0.8, linestyle="--")
        panel.set_ylabel(f"score lost, {name}")
    axes[0].legend(frameon=False, fontsize=8)
    axes[1].set_xticks(found.counts)
    axes[1].set_xlabel("activations removed")
    return svg(drawn)


def written(folder: Path = HERE) -> dict[str, str]:
    found = ReductionsRecovered.load(folder / "reductions.json")
    return {"setting": setting(found), "reductions": by_reduction(found), "against": against(found)}


def setting(found: ReductionsRecovered) -> str:
    layers = "; ".join(f"{count}: {runs(found.of(found.default, count).layers)}" for count in found.counts)
    return bullets(
        f"Learnt from {found.learnt_on.line()}; scored on {found.measured_on.line()}",
        f"{found.blocks.capitalize()} blocks; {int(found.replaced[0].steps[0])} steps each, "
        f"{counted(len(found.seeds), 'seed')}; dense model {four(found.dense.mean())}",
        f"Layers that lose their activation, of {found.measured_on.model.num_layers}: {layers}",
    )


def by_reduction(found: ReductionsRecovered) -> str:
    rows = []
    for count in found.counts:
        for name in found.reductions:
            r = found.of(name, count)
            after = f"{four(r.after.mean())} ({spread(r.after)})"
            lost = [gained(difference(found.dense, items)) for items in (r.before, r.after)]
            rows.append((count, f"`{name}`", four(r.before.mean()), lost[0], after, lost[1]))
    head = ("removed", "reduction", "at once", "lost, 95 %", "after recovery (seeds)", "lost, 95 %")
    return table(head, rows)


def against(found: ReductionsRecovered) -> str:
    """The score of every other reduction less that of the one that is plainest, paired by item."""
    rows = []
    for name in found.reductions:
        for count in found.counts if name != found.default else ():
            both = found.of(name, count), found.of(found.default, count)
            each = [difference(*(getattr(r, when) for r in both)) for when in ("before", "after")]
            rows.append((count, f"`{name}`", *(f"{gained(d)}, {told(d)}" for d in each)))
    return table(("removed", f"less `{found.default}`", "at once", "after recovery"), rows)


if __name__ == "__main__":
    run_command(main, HERE / "reductions.json", written)
