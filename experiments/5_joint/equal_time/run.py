"""Attentions and activations together against either alone and whole layers, at equal measured time and equal recovery.

    python experiments/5_joint/equal_time/run.py [--model MODEL] [--speedup 1.1 --speedup 1.2]

Each way takes the fewest parts with which a forward is so many times as fast as the dense one, real models timed in
turns; then all learn for the same steps from the same items, from the dense model's weights. Writes equal_time.json and
equal_time.svg; what they say goes into README.md by `make tables`.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

from experiments.common import Model, draw, of_model, run_command
from experiments.images import VIT
from experiments.recoveries import IMAGES, Subject, difference, finished, four, gained, spread, subject, together, told
from experiments.statements import bullets, counted, percent, span, table
from lyapunov_prune.data.examples import Examples, model_inputs
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.speed import now
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.healing.trained import drawn_order
from lyapunov_prune.joint.importance import Importance
from lyapunov_prune.joint.recovery import Lesson, recover
from lyapunov_prune.joint.result import JointRun
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.structure import find_layers
from lyapunov_prune.profiles.influence import turns
from lyapunov_prune.report.drawing import COLOURS, INK, one_panel, svg
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
SPEEDUPS = (1.1, 1.2, 1.35)
SLACK = 0.04  # of the time that a plane may be out: what is measured decides
JOINT = "joint"
WAYS = (JOINT, "attentions", "activations", "layers by influence", "layers by importance")
Parts = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # attentions, activations, whole layers


@dataclass(frozen=True)
class Way:
    """What one way takes for a speed-up: layers of each type; how fast it was; items by seed (seeds, n).

    `reached` is the speed-up when the parts were chosen, `beside` that of all ways timed in turns afterwards.
    """

    name: str
    speedup: float
    parts: Parts
    reached: float
    beside: float
    steps: np.ndarray
    items: np.ndarray


@dataclass(frozen=True)
class EqualTime(Result):
    """All ways for all speed-ups; `missed` says how far a way that cannot reach a speed-up comes at most."""

    ways: tuple[Way, ...]
    missed: dict[str, float]
    dense: np.ndarray
    seeds: tuple[int, ...]
    timed: str
    learnt_on: MeasuredOn
    measured_on: MeasuredOn

    def __post_init__(self) -> None:
        steps = np.array([way.steps for way in self.ways])
        if len(np.unique(steps)) > 1:
            raise LyapunovPruneError(f"ways took {steps.min()} to {steps.max()} steps; recover all of them alike")

    @property
    def speedups(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(way.speedup for way in self.ways))

    def at(self, speedup: float) -> dict[str, Way]:
        return {way.name: way for way in self.ways if way.speedup == speedup}


def main(
    model: Model = Model(VIT, "cpu", "float32"),
    text: str = "builtin",
    tokens: int = 40960,
    context: int = 256,
    speedup: Annotated[list[float] | None, typer.Option()] = None,
    seeds: int = 2,
    steps: int = 100,
    repeats: int = 25,
) -> None:
    torch.set_num_threads(1)  # what the processor spends is then what a forward takes
    given = subject(model, text, tokens, context)
    found = measure(given, tuple(speedup or SPEEDUPS), seeds, steps, repeats)
    folder = of_model(HERE, model.name, VIT)
    found.save(folder / "equal_time.json")
    draw(folder, {"equal_time": figure(found)})


def measure(of: Subject, speedups: tuple[float, ...], seeds: int, steps: int, repeats: int) -> EqualTime:
    run = finished(of)
    about = of.about() | {
        "steps": steps,
        "repeats": repeats,
        "importance": encode(run.importance),
        "map": encode(run.map),
    }
    with Store(of.jobs / "equal_time", "equal time", about) as store:
        student = of.student(run.importance.reduction)
        orders = ordered(of, run, store)
        count = IMAGES if of.final.images else 1
        clock = Clock(student, store, repeats, of.data.learn.take(range(count)))
        chosen: dict[tuple[float, str], Parts] = {}
        missed: dict[str, float] = {}
        for speedup in speedups:
            for name in WAYS:
                candidates = pairs_first(clock, run, orders, speedup) if name == JOINT else orders[name]
                parts = first_to_reach(clock, candidates, speedup, in_turn=name == JOINT)
                if parts is None:
                    missed[f"{name} {speedup:g}"] = max(map(clock.of, candidates), default=1.0)
                else:
                    chosen[speedup, name] = parts
        beside = {s: clock.together([p for (t, _), p in chosen.items() if t == s]) for s in speedups}
        ways = []
        for (speedup, name), parts in chosen.items():
            rows = [learnt(of, student, parts, steps, seed, store) for seed in range(seeds)]
            ways.append(
                Way(
                    name=name,
                    speedup=speedup,
                    parts=parts,
                    reached=clock.of(parts),
                    beside=beside[speedup][counts(parts)],
                    steps=np.array([row["steps"] for row in rows]),
                    items=together([rows], of.final)[0],
                )
            )
        if "dense" not in store:
            store.add("dense", of.scored(of.model))
        return EqualTime(
            ways=tuple(ways),
            missed=missed,
            dense=together([[store["dense"]]], of.final)[0, 0],
            seeds=tuple(range(seeds)),
            timed=clock.line(),
            learnt_on=of.data.learn.measured_on(of.model),
            measured_on=of.final,
        )


def ordered(of: Subject, run: JointRun, store: Store) -> dict[str, list[Parts]]:
    """Of every way but `joint` what it takes, one part more each; those of a type and layers in orders of their own."""
    worth, L = run.importance, len(run.importance.attention)
    if "influence" not in store:
        store.add("influence", influence(of).tolist())
    by = np.argsort(store["influence"], kind="stable"), np.argsort(places(worth), kind="stable")
    most = L - 1 if of.model.can_generate() else L
    return {
        "attentions": [(worth.first(n, 0)[0], (), ()) for n in range(1, most + 1)],
        "activations": [((), worth.first(0, n)[1], ()) for n in range(1, L + 1)],
        "layers by influence": [((), (), tuple(sorted(by[0][:n].tolist()))) for n in range(1, L)],
        "layers by importance": [((), (), tuple(sorted(by[1][:n].tolist()))) for n in range(1, L)],
    }


def influence(of: Subject) -> np.ndarray:
    """Block Influence of every layer on the slice to learn from."""
    structure = find_layers(of.model)
    each = [turns(structure, item) for item in model_inputs(of.model, of.data.learn, 1)]
    return np.concatenate(each, axis=-1)[:, 0].mean(-1)


def places(worth: Importance) -> np.ndarray:
    """A layer's places in the orders of both types together: numbers of two types are not compared."""
    attention, activation = (
        np.argsort(np.argsort(w, kind="stable"), kind="stable") for w in (worth.attention, worth.activation)
    )
    return attention + activation


def pairs_first(clock: "Clock", run: JointRun, orders: dict[str, list[Parts]], speedup: float) -> list[Parts]:
    """Pairs that the plane has near the budget or within and that the points reach, best of the map first."""
    times = clock.plane(orders)
    n_a, n_g = np.indices(times.shape)
    pairs = np.argwhere((times * speedup <= 1 + SLACK) & (n_a + n_g <= run.points.pairs.sum(1).max()))
    order = np.argsort(-run.map.predict(pairs / run.decision.layers), kind="stable")
    return [(*run.importance.first(*pairs[at].tolist()), ()) for at in order]


def counts(parts: Parts) -> str:
    """What the time of a model goes by: how many of each, not which."""
    return "-".join(str(len(layers)) for layers in parts)


class Clock:
    """How many times as fast as the dense model others are, real ones in turns with it; each measured once."""

    def __init__(self, student: Unmerged, store: Store, repeats: int, examples: Examples) -> None:
        self.student, self.store, self.repeats, self.examples = student, store, repeats, examples

    def of(self, parts: Parts) -> float:
        key = f"time {counts(parts)}"
        if key not in self.store:
            self.store.add(key, self._measured([parts])[0])
        return float(self.store[key])

    def together(self, all_parts: list[Parts]) -> dict[str, float]:
        """All of them in one run."""
        distinct = {counts(parts): parts for parts in all_parts}
        key = f"beside {' '.join(distinct)}"
        if key not in self.store:
            self.store.add(key, dict(zip(distinct, self._measured(list(distinct.values())), strict=True)))
        return {name: float(value) for name, value in self.store[key].items()}

    def plane(self, orders: dict[str, list[Parts]]) -> np.ndarray:
        """Times (A + 1, G + 1) of pairs over that of the dense model: a plane through it and through the models that
        have lost all of a type, an estimate."""
        ends = [orders[name][-1] for name in ("attentions", "activations")]
        saved = [(1 - 1 / self.of(parts)) / sum(map(len, parts)) for parts in ends]
        n_a, n_g = np.indices([1 + sum(map(len, parts)) for parts in ends])
        return 1 - n_a * saved[0] - n_g * saved[1]

    def _measured(self, all_parts: list[Parts]) -> list[float]:
        models = [self.student.model, *map(self._real, all_parts)]
        inputs = model_inputs(self.student.model, self.examples, len(self.examples))[0]
        times = np.median(seconds(models, inputs, self.repeats), 1)
        return (times[0] / times[1:]).tolist()

    def _real(self, parts: Parts) -> PreTrainedModel:
        attention, activation, layers = parts
        return make_compact(self.student.model, Cuts(attention, self.student.merged(activation), remove=layers))

    def line(self) -> str:
        on = self.examples.measured_on(self.student.model)
        what = counted(on.tokens, "image") if on.images else counted(on.tokens, "token")
        return (
            f"one forward of {what}, seconds of the processor, one thread, medians of {self.repeats}, real compact "
            "models in turns with the dense one"
        )


@torch.no_grad()
def seconds(models: list[PreTrainedModel], inputs: torch.Tensor, repeats: int) -> np.ndarray:
    """What a forward took, (models, repeats), the models in turns, after a round to warm up.

    Of the processor, which other work on the machine does not lengthen; of a GPU by the clock.
    """
    taken = np.empty((len(models), repeats + 1))
    for turn in range(repeats + 1):
        for place, model in enumerate(models):
            began = spent(model)
            uncached_logits(model, inputs)
            taken[place, turn] = spent(model) - began
    return taken[:, 1:]


def spent(model: PreTrainedModel) -> float:
    return time.process_time() if model.device.type == "cpu" else now(model)


def first_to_reach(clock: Clock, candidates: list[Parts], speedup: float, *, in_turn: bool) -> Parts | None:
    """The first of the candidates whose measured time reaches the speed-up; None if the last does not.

    Those of one more part each are searched by halves, as each is faster than the one before it.
    """
    if in_turn:
        return next((parts for parts in candidates if clock.of(parts) >= speedup), None)
    if clock.of(candidates[-1]) < speedup:
        return None
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if clock.of(candidates[middle]) >= speedup else (middle + 1, high)
    return candidates[low]


def learnt(of: Subject, student: Unmerged, parts: Parts, steps: int, seed: int, store: Store) -> dict[str, Any]:
    """A model without these parts after `steps` of distillation from the dense weights, on the final slice."""
    key = f"{'/'.join(','.join(map(str, layers)) for layers in parts)} seed {seed}"
    if key not in store:
        recipe = of.recipe
        items = drawn_order(len(of.data.learn), steps * recipe.batch, seed)
        lesson = Lesson(key, parts[0], parts[1], tuple(items), seed)
        folder = of.jobs / "equal_time" / "state"
        about = {**of.about(), **vars(lesson), "layers": parts[2]}
        with cut(student, parts) as model, TrainingState(folder, about) as state:
            losses = recover(model, student.model, of.data.learn, lesson, recipe, state)
            store.add(key, {**of.scored(model), "steps": len(losses)})
            state.forget()
    return store[key]


@contextmanager
def cut(student: Unmerged, parts: Parts) -> Iterator[PreTrainedModel]:
    """A copy of the dense model, which is the teacher, without these parts."""
    if parts[2]:
        yield make_compact(student.model, Cuts(remove=parts[2]))
    else:
        with copy.deepcopy(student).cut(parts[0], parts[1]) as model:
            yield model


def figure(found: EqualTime) -> str:
    drawn, axes = one_panel(6.5, 3.6)
    colours = dict(zip(WAYS, COLOURS.values(), strict=False))
    for name in WAYS:
        ways = [found.at(s)[name] for s in found.speedups if name in found.at(s)]
        if ways:
            beside, scores = [w.beside for w in ways], [w.items.mean() for w in ways]
            style = {"markersize": 9, "markerfacecolor": "none"} if name == JOINT else {"markersize": 4}
            axes.plot(beside, scores, "o-", **style, color=colours[name], label=name)
            for w in ways:
                axes.plot([w.beside] * len(w.items), w.items.mean(-1), ".", markersize=3, color=colours[name])
    axes.axhline(found.dense.mean(), color=INK, linewidth=0.8, linestyle="--", label="dense")
    axes.set(xlabel="times as fast as dense, all ways in one run", ylabel="score on the final slice")
    axes.legend(frameon=False, fontsize=8)
    return svg(drawn)


def written(folder: Path = HERE) -> dict[str, str]:
    found = EqualTime.load(folder / "equal_time.json")
    return {"setting": setting(found), "ways": by_way(found), "latency": latency(found), **tally(found)}


def setting(found: EqualTime) -> str:
    return bullets(
        f"Learnt from {found.learnt_on.line()}; scored on {found.measured_on.line()}",
        f"{int(found.ways[0].steps[0])} steps each, from the dense weights, {counted(len(found.seeds), 'seed')}; "
        f"dense model {four(found.dense.mean())}",
        f"Times: {found.timed}",
    )


def by_way(found: EqualTime) -> str:
    rows = []
    for speedup in found.speedups:
        ways = found.at(speedup)
        for name, way in ways.items():
            a, g, layers = way.parts
            took = [f"{len(x)} {what}" for x, what in ((a, "attentions"), (g, "activations"), (layers, "layers")) if x]
            less = gained(difference(ways[JOINT].items, way.items)) if JOINT in ways and name != JOINT else "—"
            score = f"{four(way.items.mean())} ({spread(way.items)})"
            rows.append((f"{speedup:g}", name, ", ".join(took), way.reached, way.beside, score, less))
    head = ("speed-up", "way", "takes", "chosen at", "all in one run", "final slice (seeds)", "joint less this, 95 %")
    return table(head, rows)


def latency(found: EqualTime) -> str:
    """By type, the share of a dense forward that one part saves, `(1 − 1/speed-up) / parts`, over all that was timed.

    `of all` is what it comes to in as many layers as the model has.
    """
    saved: dict[str, list[float]] = {"attention": [], "activation": [], "layer": []}
    for way in found.ways:
        for kind, gone in zip(saved, way.parts, strict=True):
            if len(gone) == sum(map(len, way.parts)):  # of one type alone
                saved[kind] += [(1 - 1 / speedup) / len(gone) for speedup in (way.reached, way.beside)]
    layers = found.measured_on.model.num_layers
    rows = [
        [
            kind,
            f"{span(100 * x for x in shares)} %",
            percent(float(np.median(shares))),
            percent(layers * float(np.median(shares))),
        ]
        for kind, shares in saved.items()
    ]
    return table(["one part removed", "of the dense forward", "median", f"of all {layers}, at the median"], rows)


def tally(found: EqualTime) -> dict[str, str]:
    """How often joint is better and worse than a way that takes other parts."""
    words = [
        told(difference(ways[JOINT].items, way.items))
        for ways in map(found.at, found.speedups)
        for name, way in ways.items()
        if JOINT in ways and way.parts != ways[JOINT].parts
    ]
    return {"comparisons": str(len(words)), "better": str(words.count("better")), "worse": str(words.count("worse"))}


if __name__ == "__main__":
    run_command(main, HERE / "equal_time.json", written)
