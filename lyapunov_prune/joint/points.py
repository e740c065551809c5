"""The recovered points of a map: each starts from the weights of the previous one on its chain and is one job."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from scipy import stats
from transformers import PreTrainedModel

from lyapunov_prune.data.examples import Examples
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.score import score
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.healing.trained import drawn_order, trained
from lyapunov_prune.joint.chains import DENSE, Pair
from lyapunov_prune.joint.importance import Importance
from lyapunov_prune.joint.recovery import Lesson, RecoveryRecipe, inherit, recover
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.recurrence import forget_states
from lyapunov_prune.progress import track, warn
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.files import require_disk
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store


@dataclass(frozen=True)
class Points(Result):
    """Recovered pairs, n of them: `pairs` (n, 2), `seeds` (n,), `scores` (n,) on the selection slice, larger is better.

    `items` (n, m) is the score of each of the m selection items, with mean `scores`. `losses` (n, 2) is the
    distillation loss at the first and before the last step; `seconds` (n,) covers training and scoring. Each point was
    trained for `steps` steps from the weights of the previous pair on its chain, so the k-th point of a chain has seen
    k·steps of them.
    """

    layers: int
    steps: int
    recipe: RecoveryRecipe
    pairs: Annotated[np.ndarray, Per("point", 2, below="layer+1")]
    seeds: np.ndarray
    scores: Annotated[np.ndarray, Per("point", least=-np.inf)]
    items: np.ndarray
    losses: Annotated[np.ndarray, Per("point", 2, least=-np.inf)]
    seconds: Annotated[np.ndarray, Per("point")]
    measured_on: tuple[MeasuredOn, ...]

    @property
    def first(self) -> np.ndarray:
        """(n,) bool: the points of the first seed, to which the map is fitted."""
        return self.seeds == self.seeds[0]

    def repeats(self) -> list[list[float]]:
        """For each pair with several seeds, its scores."""
        rows: dict[Pair, list[float]] = {}
        for (a, g), value in zip(self.pairs.tolist(), self.scores.tolist(), strict=True):
            rows.setdefault((a, g), []).append(value)
        return [row for row in rows.values() if len(row) > 1]

    def difference_error(self, first: int, second: int) -> float:
        """Standard error of the difference of the scores of two points, paired by item."""
        return float(stats.sem(self.items[first] - self.items[second]))

    def to_frame(self) -> pd.DataFrame:
        attention, activation = self.pairs.T
        columns = {"attention": attention, "activation": activation, "seed": self.seeds, "score": self.scores}
        losses = {"first loss": self.losses[:, 0], "last loss": self.losses[:, 1]}
        return pd.DataFrame({**columns, **losses, "seconds": self.seconds})

    def headline(self) -> str:
        return f"{int(self.first.sum())} recovered points of {self.layers} layers, {self.steps} steps each"


@dataclass(frozen=True, eq=False)
class Course:
    """What the recoveries of one run share; each keeps its state in its own folder under `folder`.

    `student` is the dense model with its possible cuts. It is not changed, because its model is the teacher.
    """

    student: Unmerged
    learn: Examples
    importance: Importance
    parents: dict[Pair, Pair]
    steps: int
    seed: int
    recipe: RecoveryRecipe
    folder: Path
    about: dict[str, Any]

    @property
    def teacher(self) -> PreTrainedModel:
        return self.student.model

    def lineage(self, pair: Pair) -> list[Pair]:
        """The points before `pair` on its chain, and `pair`; empty for the dense model."""
        return [] if pair == DENSE else [*self.lineage(self.parents[pair]), pair]

    def lesson(self, pair: Pair, seed: int) -> Lesson:
        """Training data and cuts of the point `pair`. Along a chain every item is used once before any is repeated."""
        depth = sum(pair)
        name = f"point ({pair[0]}, {pair[1]})" + ("" if seed == self.seed else f" of seed {seed}")
        each = self.steps * self.recipe.batch
        items = drawn_order(len(self.learn), depth * each, seed)[-each:]
        return Lesson(name, *self.importance.first(*pair), tuple(items), seed + 1000 * depth)

    def last_lesson(self, pair: Pair, start: Pair, steps: int) -> Lesson:
        """The final recovery of `pair`, starting from the weights of the point `start`."""
        before = sum(start) * self.steps * self.recipe.batch
        items = drawn_order(len(self.learn), before + steps * self.recipe.batch, self.seed)[before:]
        return Lesson("the final recovery", *self.importance.first(*pair), tuple(items), self.seed)

    def nearest(self, pair: Pair) -> Pair:
        """`pair` if it is a point, else the largest point that removes no more of either type."""
        smaller = [p for p in (DENSE, *self.parents) if p[0] <= pair[0] and p[1] <= pair[1]]
        return max(smaller, key=sum)

    def state(self, name: str, lesson: Lesson) -> TrainingState:
        return TrainingState(self.folder / name, {**self.about, **vars(lesson)})

    def taught(self, pair: Pair) -> Unmerged:
        """A student with the weights of the point `pair`. Raises LyapunovPruneError if a state is missing."""
        forget_states(self.student.decoder.structure)  # of RecurrentGemma's last forward, which no copy can hold
        student = copy.deepcopy(self.student)
        lineage = self.lineage(pair)
        for point in lineage if self.recipe.rank is not None else lineage[-1:]:
            lesson = self.lesson(point, self.seed)
            with self.state(_name(point), lesson) as state:
                tensors = state.load()
            if not tensors:
                raise LyapunovPruneError(
                    f"{self.folder} lacks the weights of {lesson.name}; delete that folder and run again"
                )
            inherit(student, lesson, self.recipe, tensors)
        return student

    def learn_point(self, point: Pair, seed: int) -> tuple[Unmerged, Lesson, list[float]]:
        """Train the point from the weights of the previous one on its chain; its state is kept."""
        name = _name(point) if seed == self.seed else f"{_name(point)}-{seed}"
        return self._learn(self.lesson(point, seed), self.parents[point], name)

    def finish(
        self, pair: Pair, start: Pair, steps: int, *, name: str = "final"
    ) -> tuple[Unmerged, Lesson, list[float]]:
        """Final recovery of `pair` from the weights of the point `start`; its state is kept under `name`."""
        return self._learn(self.last_lesson(pair, start, steps), start, name)

    def _learn(self, lesson: Lesson, start: Pair, name: str) -> tuple[Unmerged, Lesson, list[float]]:
        student = self.taught(start)
        with self.state(name, lesson) as state:
            return student, lesson, recover(student, self.teacher, self.learn, lesson, self.recipe, state)

    def forget(self, keep: Sequence[Pair] = ()) -> None:
        """Delete the states of all points except these."""
        for point in self.parents:
            if point not in keep:
                self.drop(_name(point), self.lesson(point, self.seed))

    def drop(self, name: str, lesson: Lesson) -> None:
        """Delete the state of one recovery."""
        with self.state(name, lesson) as state:
            state.forget()


def recover_points(
    course: Course, select: Examples, repeated: Sequence[Pair], seeds: int, store: Store, *, batch_size: int
) -> Points:
    """Recover and score every point of `course`, and those in `repeated` with `seeds` − 1 more seeds.

    Each is a job in `store`: after `kill -9` finished jobs are not repeated, and an unfinished one continues from its
    state. The weights of a point stay in its folder until the course forgets them, because the final recovery may start
    from any of them.

    Raises LyapunovPruneError naming point and step for a loss that is not finite, and for a disk without room.
    """
    jobs = [(point, course.seed) for point in course.parents]
    jobs += [(point, course.seed + n) for n in range(1, seeds) for point in repeated]
    rows: list[dict[str, Any]] = []
    _require_disk(course, sum(f"{_name(point)}-{seed}" not in store for point, seed in jobs))
    for point, seed in track(jobs, "points"):
        key = f"{_name(point)}-{seed}"
        if key not in store:
            store.add(key, _recovered(course, select, point, seed, batch_size=batch_size))
            if seed != course.seed:  # no point inherits from it
                course.drop(key, course.lesson(point, seed))
        rows.append(store[key])
        if len(rows) == sum(0 in pair for pair in course.parents):  # both axes are done; they come first
            _warn_of_noise(rows)
    return Points(
        layers=len(course.student.blocks),
        steps=course.steps,
        recipe=course.recipe,
        pairs=np.array([point for point, _ in jobs]),
        seeds=np.array([seed for _, seed in jobs]),
        scores=np.array([row["score"] for row in rows]),
        items=np.array([row["items"] for row in rows]),
        losses=np.array([row["losses"] for row in rows]),
        seconds=np.array([row["seconds"] for row in rows]),
        measured_on=(course.learn.measured_on(course.teacher), select.measured_on(course.teacher)),
    )


def _recovered(course: Course, select: Examples, point: Pair, seed: int, *, batch_size: int) -> dict[str, Any]:
    began = time.monotonic()
    student, lesson, losses = course.learn_point(point, seed)
    with student.cut(lesson.attention, lesson.activation) as model:
        scored = score(model, select, batch_size=batch_size)
    return {
        "score": scored.value,
        "items": scored.items.tolist(),
        "losses": [losses[0], losses[-1]],
        "seconds": time.monotonic() - began,
    }


def _warn_of_noise(rows: Sequence[dict[str, Any]]) -> None:
    """Warn if the selection slice cannot separate the best of these points from the worst."""
    best, worst = (pick(rows, key=lambda row: row["score"]) for pick in (max, min))
    error = float(stats.sem(np.subtract(best["items"], worst["items"])))
    if (spread := best["score"] - worst["score"]) <= error:
        warn(
            f"the points of both axes differ by {spread:.3g} at most, and the selection error is {error:.3g}: the "
            "decision is likely to be refused; interrupt, and give more data"
        )


def _name(point: Pair) -> str:
    return f"{point[0]}-{point[1]}"


def _require_disk(course: Course, jobs: int) -> None:
    """Raise LyapunovPruneError unless the disk can hold the weights of the points and one training state."""
    with trained(course.teacher, course.recipe.rank, 0) as parameters:
        size = sum(p.nbytes for p in parameters.values())
    if jobs:
        what = f"the weights of {jobs} points, {size:,} bytes each,"
        require_disk(course.folder, (jobs + 3) * size, what, "train updates of low rank instead")
