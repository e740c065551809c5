"""The search of a joint removal: recover points, fit a map to their scores, and choose the best pair of the budget."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from lyapunov_prune.joint.chains import LEAST_REACH, Pair, chains, rivals
from lyapunov_prune.joint.decision import JointDecision, decide
from lyapunov_prune.joint.importance import Importance, measure_importance
from lyapunov_prune.joint.job import JointJob
from lyapunov_prune.joint.map import JointMap, fit_map
from lyapunov_prune.joint.points import Course, Points, recover_points
from lyapunov_prune.results.store import Store


@dataclass(frozen=True, eq=False)
class Found:
    """What a search measured, and the pair that it chose; the weights of the points are in the folder of `course`."""

    importance: Importance
    course: Course
    points: Points
    map: JointMap
    decision: JointDecision


def search(job: JointJob, store: Store) -> Found:
    """Measure importance, recover the points, and decide.

    What `store` and the folder of the job hold is not measured again. Raises as `remove_jointly` does.
    """
    learn, select, _ = job.slices
    reach = max(job.remove, LEAST_REACH)
    with job.timing("importance"):
        worth = job.once(
            "importance",
            Importance,
            lambda: measure_importance(
                job.student,
                learn,
                batch=job.recipe.batch,
                seed=job.seed,
            ),
        )
    course = Course(
        job.student, learn, worth, chains(reach, job.most), job.steps, job.seed, job.recipe, job.folder, job.about
    )
    between = rivals(reach, job.most, set(job.pairs))
    points = recover_points(course, select, between, job.seeds, store, batch_size=job.batch_size)
    job.seconds["points"] = float(points.seconds.sum())  # includes earlier runs
    with job.timing("decision"):
        fitted = fit_map(
            (points.pairs[points.first] / job.layers).tolist(),
            points.scores[points.first].tolist(),
            measured_on=points.measured_on,
        )
        decision = decide(
            fitted,
            job.layers,
            remove=job.remove,
            most=job.most,
            repeats=points.repeats(),
            selection_error=_selection_error(points, between),
        )
    return Found(worth, course, points, fitted, decision)


def _selection_error(points: Points, between: list[Pair]) -> float:
    """Root mean square, over pairs of `between`, of the standard error of the difference of their scores."""
    places = [i for i, pair in enumerate(points.pairs.tolist()) if points.first[i] and tuple(pair) in between]
    errors = [points.difference_error(i, j) for i, j in combinations(places, 2)]
    return float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0
