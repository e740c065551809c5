"""A joint removal from end to end: importance, points, map, decision, recovery, compact checkpoint, score."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.arguments import Count, Range, Seed
from lyapunov_prune.data.examples import Examples
from lyapunov_prune.data.slices import NAMES
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.evaluation.judging import Comparison, compare
from lyapunov_prune.evaluation.score import paired_error, score
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.compact_checkpoint import save_compact
from lyapunov_prune.export.formats.compact import COMPACT
from lyapunov_prune.forward.hooks import run_through
from lyapunov_prune.forward.logits import SAME_LIMIT, deviation, sample_inputs, uncached_logits
from lyapunov_prune.healing.state import KEPT, clear_states
from lyapunov_prune.healing.trained import require_trainable
from lyapunov_prune.joint import card
from lyapunov_prune.joint.chains import LEAST_REACH, Pair, chains, reach_of, rivals
from lyapunov_prune.joint.decision import decide, within_budget
from lyapunov_prune.joint.importance import Importance, Method, measure_importance
from lyapunov_prune.joint.map import fit_map
from lyapunov_prune.joint.points import Course, Points, recover_points
from lyapunov_prune.joint.recovery import Lesson, Recipe
from lyapunov_prune.joint.result import PLAN, REPORT, JointRun
from lyapunov_prune.joint.times import Times, measure_times
from lyapunov_prune.merging.table import DEFAULT
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.decoder import takes_model
from lyapunov_prune.models.left_out import require_whole
from lyapunov_prune.models.plain import PlainAny
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.pruning.counting import sizes_in_memory
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import describe
from lyapunov_prune.results.files import require_empty, whole_folder
from lyapunov_prune.results.history import add_step
from lyapunov_prune.results.once import once
from lyapunov_prune.results.result import MeasuredOn, encode
from lyapunov_prune.results.store import Store, clear_results

_RECIPE = Recipe(rank=8)
_LEAST_SELECTED = 5  # with 4 items a standard error has a relative error of 1/√(2(n − 1)), two fifths
MERGED = 10.0  # times the rounding limit of a single model: a merge rounds a product and sums in another order


@takes_model
@in_eval_mode
def remove_jointly(
    model: PlainAny,
    tokenizer: PreTrainedTokenizerBase | None,
    slices: tuple[Examples, Examples, Examples],
    output: str | Path,
    *,
    remove: int | None = None,
    speedup: Annotated[float, Range(1, above=True)] | None = None,
    reduction: str = DEFAULT,
    importance: Method = "taylor",
    steps: Count = 12,
    recover_steps: Count = 100,
    recipe: Recipe = _RECIPE,
    seeds: Count = 2,
    seed: Seed = 0,
    folder: str | Path,
    batch_size: Count = 1,
) -> JointRun:
    """Remove attentions and activations of `model`, the number of each chosen by a map of the score after recovery.

    `slices` are three disjoint sets of data: to train on, to select by, and the final one, which is scored once at the
    end. Importance gives an order within each type; the points of `chains.chains` are recovered for `steps` steps each
    and scored on the selection slice; a map is fitted to them, and the decision is its best pair within the budget,
    `remove` or `speedup`. That pair is trained for `recover_steps` more steps from the weights of its point or the
    nearest smaller one; these weights are kept if training does not pay on the selection slice. It is merged, written
    to the folder `output` as a compact checkpoint that has passed its gate, and scored. `recipe` holds what all
    recoveries share.

    Without `reduction` blocks are reduced by the least-squares fit: after recovery it was better than or
    indistinguishable from the others on two models (experiments/5_joint). `folder` keeps the unfinished work:
    an interrupted run continues from there and reaches the same decision; it is emptied when `output` exists.

    Raises LyapunovPruneError for both budgets or none, one that cannot be met, slices that share data, a final slice
    that a recorded step of `model` has seen, fewer than five items to select by, a model that the compact format does
    not support, the errors of `decide`, `fit_map` and `recover`, and a run of another kind in `folder`; CheckFailed
    when the gate does not hold. In all cases `output` stays empty.
    """
    require_empty(output)
    learn, select, final = slices
    dense = model.model
    require_whole(dense)
    require_trainable(dense, "the model")
    origins = tuple(data.measured_on(dense) for data in slices)
    _require_apart(slices, origins)
    require_unseen(dense, final)
    if len(select) < _LEAST_SELECTED:
        raise LyapunovPruneError(
            f"{len(select)} items to select by are too few to estimate an error; give {_LEAST_SELECTED} or more (for a "
            "text raise --tokens or lower --context)"
        )
    L = model.structure.num_layers
    most = (L - 1 if dense.can_generate() else L, L)
    if speedup is None or remove is not None:  # fail early on a wrong budget
        within_budget(L, remove, speedup, None, most)
    seconds: dict[str, float] = {}
    with _timing(seconds, "calibration"):
        student = Unmerged(model, reduction, lambda: run_through(model, learn))
    folder = Path(folder)
    about: dict[str, Any] = {
        "slices": encode(origins),
        "budget": {"remove": remove, "speedup": speedup},
        "reduction": student.reduction,
        "importance": importance,
        "recipe": encode(recipe),
        "steps": [steps, recover_steps],
        "seeds": [seed, seeds],
    }
    with Store(folder, "joint removal", about) as store:
        times = None
        if speedup is not None:
            with _timing(seconds, "times"):
                times = once(
                    folder / "times.json",
                    Times,
                    origins[0],
                    about,
                    lambda: measure_times(student, learn, most),
                )
        table = None if times is None else times.table()
        pairs = within_budget(L, remove, speedup, None if table is None else table.tolist(), most)
        allowed = {(a, g) for a, g in pairs.tolist()}
        reach = max(reach_of(allowed), LEAST_REACH)
        with _timing(seconds, "importance"):
            worth = once(
                folder / "importance.json",
                Importance,
                origins[0],
                about,
                lambda: measure_importance(
                    student, learn, importance, batch=recipe.batch, targets=_targets(reach, most), seed=seed
                ),
            )
        course = Course(student, learn, worth, chains(reach, most), steps, seed, recipe, folder, about)
        between = rivals(reach, most, allowed)
        points = recover_points(course, select, between, seeds, store, batch_size=batch_size)
        seconds["points"] = float(points.seconds.sum())  # includes earlier runs
        with _timing(seconds, "decision"):
            fitted = fit_map(
                (points.pairs[points.first] / L).tolist(),
                points.scores[points.first].tolist(),
                measured_on=points.measured_on,
            )
            if table is not None:
                n_a, n_g = np.indices(table.shape)
                table[n_a + n_g > reach] = np.nan  # beyond the points the polynomial would extrapolate
            decision = decide(
                fitted,
                L,
                remove=remove,
                speedup=speedup,
                seconds=None if table is None else table.tolist(),
                most=most,
                repeats=points.repeats(),
                selection_error=_selection_error(points, between),
            )
        start = course.nearest(decision.chosen)
        course.forget(keep=course.lineage(start))
        with _timing(seconds, "recovery"):
            pupil, lesson, losses, gain = _recovered(
                course, select, decision.chosen, start, recover_steps, batch_size=batch_size
            )
        saw = origins[:2]
        add_step(pupil.model, "heal", saw[:1], dense)
        gone = lesson.activation
        cuts = Cuts(lesson.attention, pupil.merged(gone), saw, hidden=pupil.hidden(gone))
        plan = PruningPlan(
            remove=(),
            criterion=f"joint, {importance} within each type",
            alpha=None,
            scores=np.empty(0),
            model=model.identity,
            measured_on=saw,
            drop_attention=lesson.attention,
            drop_activation=lesson.activation,
            reduction=student.reduction if lesson.activation else None,
        )
        compact = make_compact(pupil.model, cuts)
        _require_merged(pupil, lesson, compact)
        with whole_folder(output, KEPT) as partial:
            with _timing(seconds, "checkpoint"):
                gate = save_compact(partial, pupil.decoder, compact, tokenizer, cuts, learn)
            with _timing(seconds, "final scores"):
                before, chosen = (score(m, final, batch_size=batch_size) for m in (model, compact))
            run = JointRun(
                importance=worth,
                points=points,
                map=fitted,
                decision=decision,
                plan=plan,
                times=times,
                start=start,
                losses=np.array(losses),
                gain=gain,
                dense=before.value,
                chosen=chosen.value,
                error=paired_error(before, chosen),
                parameters=(dense.num_parameters(), compact.num_parameters()),
                size=tuple(sum(size for _, size in sizes_in_memory(m)) for m in (dense, compact)),  # type: ignore[arg-type]
                seconds=seconds,
                measured_on=origins[2],
            )
            run.save(partial / REPORT)
            plan.save(partial / PLAN)
            describe(
                partial,
                plan,
                gate,
                model.structure,
                compact,
                stored=COMPACT,
                since=card.since(run),
                sections=card.sections(run),
            )
    _clear(course)
    return run


@contextmanager
def _timing(seconds: dict[str, float], part: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[part] = time.monotonic() - began


def _targets(reach: int, most: Pair) -> Pair:
    """How many of each type learned importance removes: half of the points' reach."""
    half = max(reach // 2, 1)
    return min(half, most[0]), min(half, most[1])


def _selection_error(points: Points, between: list[Pair]) -> float:
    """Root mean square, over pairs of `between`, of the standard error of the difference of their scores."""
    places = [i for i, pair in enumerate(points.pairs.tolist()) if points.first[i] and tuple(pair) in between]
    errors = [points.difference_error(i, j) for i, j in combinations(places, 2)]
    return float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0


def _require_apart(slices: tuple[Examples, Examples, Examples], origins: tuple[MeasuredOn, ...]) -> None:
    """Raise LyapunovPruneError when two of the three slices (train, select, final) share data.

    Tokens are compared by runs of 64, images one by one.
    """
    named = zip(NAMES, slices, origins, strict=True)
    for (name, data, _), (other, _, seen) in combinations(named, 2):
        if shared := data.shared_with(seen):
            what = "images" if seen.images else "tokens"
            raise LyapunovPruneError(
                f"the {name} and the {other} slice share {shared} {what} of {seen.text}; give three slices apart"
            )


def _recovered(
    course: Course, select: Examples, pair: Pair, start: Pair, steps: int, *, batch_size: int
) -> tuple[Unmerged, Lesson, list[float], Comparison]:
    """Train `pair` for `steps` more steps; keep the start if the result is worse on `select`.

    Returns the student, the losses of the steps, and the comparison over the items of `select`.
    """
    pupil, lesson, losses = course.finish(pair, start, steps)
    untaught = course.taught(start)

    def scored(student: Unmerged) -> np.ndarray:
        with student.cut(lesson.attention, lesson.activation) as model:
            return score(model, select, batch_size=batch_size).losses

    gain = compare(scored(untaught), scored(pupil))
    return pupil if gain.pays else untaught, lesson, losses, gain


@torch.no_grad()
def _require_merged(pupil: Unmerged, lesson: Lesson, compact: PreTrainedModel) -> None:
    """Raise CheckFailed unless `compact` computes what the trained model does; the gate cannot know this."""
    inputs = sample_inputs(pupil.decoder, None)[0]
    with pupil.cut(lesson.attention, lesson.activation) as model:
        reference = uncached_logits(model, inputs)
    error, limit = deviation(uncached_logits(compact, inputs), reference), MERGED * SAME_LIMIT[pupil.model.dtype]
    if not error <= limit:
        raise CheckFailed(
            f"the merged model differs from the trained one: logits deviate by {error:.2g} (limit {limit:.0e}); "
            "report this"
        )


def _clear(course: Course) -> None:
    """Delete all unfinished work."""
    course.forget()
    clear_states(course.folder / "final")
    for name in ("times.json", "importance.json"):
        (course.folder / name).unlink(missing_ok=True)
    clear_results(course.folder, "joint removal")
