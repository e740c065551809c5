"""The end of a joint removal: recover the chosen pair, merge it, write the compact checkpoint, and score it."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.checkpoints.cards import as_text
from lyapunov_prune.errors import CheckFailed, printable
from lyapunov_prune.evaluation.judging import Comparison, compare
from lyapunov_prune.evaluation.score import paired_error, score
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.compact_gate import save_compact
from lyapunov_prune.export.formats.compact import COMPACT
from lyapunov_prune.forward.logits import SAME_LIMIT, deviation, sample_inputs, uncached_logits
from lyapunov_prune.healing.state import KEPT
from lyapunov_prune.joint.chains import Pair
from lyapunov_prune.joint.importance import METHOD
from lyapunov_prune.joint.job import JointJob
from lyapunov_prune.joint.points import Course
from lyapunov_prune.joint.recovery import Lesson
from lyapunov_prune.joint.result import PLAN, REPORT, JointRun
from lyapunov_prune.joint.search import Found
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.size import model_size
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import describe
from lyapunov_prune.pruning.removed import PartsGone
from lyapunov_prune.results.files import whole_folder
from lyapunov_prune.results.history import add_step
from lyapunov_prune.results.worth import Worth

MERGED = 10.0  # times the rounding limit of a single model: a merge rounds a product and sums in another order


def finish(job: JointJob, found: Found, tokenizer: PreTrainedTokenizerBase | None, output: str | Path) -> JointRun:
    """Train the chosen pair further, write it to `output`, and score it on the final slice.

    Raises CheckFailed if the gate does not hold, and as the recovery does; `output` is then empty.
    """
    learn, _, final = job.slices
    dense, saw = job.student.decoder, job.origins[:2]
    start = found.course.nearest(found.decision.chosen)
    found.course.forget(keep=found.course.lineage(start))
    with job.timing("recovery"):
        pupil, lesson, losses, gain = _recovered(job, found.course, found.decision.chosen, start)
    add_step(pupil.model, "heal", saw[:1], dense.model)
    cuts = Cuts(lesson.attention, pupil.merged(lesson.activation), saw, hidden=pupil.hidden(lesson.activation))
    plan = _plan(job, lesson)
    compact = make_compact(pupil.model, cuts)
    _require_merged(pupil, lesson, compact)
    with whole_folder(output, KEPT) as partial:
        with job.timing("checkpoint"):
            gate = save_compact(partial, pupil.decoder, compact, tokenizer, cuts, learn)
        with job.timing("final scores"):
            before, chosen = (score(m, final, batch_size=job.batch_size) for m in (dense, compact))
        run = JointRun(
            importance=found.importance,
            points=found.points,
            map=found.map,
            decision=found.decision,
            plan=plan,
            start=start,
            losses=np.array(losses),
            gain=gain,
            dense=before.value,
            chosen=chosen.value,
            error=paired_error(before, chosen),
            parameters=(dense.model.num_parameters(), compact.num_parameters()),
            size=(model_size(dense.model).bytes, model_size(compact).bytes),
            seconds=job.seconds,
            measured_on=job.origins[2],
            rise=None if before.images else chosen.losses - before.losses,
        )
        run.save(partial / REPORT)
        plan.save(partial / PLAN)
        describe(
            partial,
            plan,
            gate,
            dense.structure,
            compact,
            stored=COMPACT,
            since=_since(run),
            sections=_sections(run),
            worth=_worth(run),
        )
    return run


def _worth(run: JointRun) -> Worth | None:
    """What the model is worth, for its card; None for images."""
    ratio, on = run.against_dense(), run.measured_on
    return None if ratio is None else Worth(math.exp(-run.chosen), ratio, f"{on.text} ({on.split})", on.tokens)


def _plan(job: JointJob, lesson: Lesson) -> PruningPlan:
    """What was removed, as a plan."""
    return PruningPlan(
        gone=PartsGone((), lesson.attention, lesson.activation, job.student.reduction if lesson.activation else None),
        criterion=f"joint, {METHOD} within each type",
        alpha=None,
        scores=np.empty(0),
        model=job.student.decoder.identity,
        measured_on=job.origins[:2],
    )


def _recovered(
    job: JointJob, course: Course, pair: Pair, start: Pair
) -> tuple[Unmerged, Lesson, list[float], Comparison]:
    """Train `pair` further; keep the start if the result is worse on the selection slice.

    Returns the student, the losses of the steps, and the comparison over the items of that slice.
    """
    pupil, lesson, losses = course.finish(pair, start, job.recover_steps)
    untaught = course.taught(start)

    def scored(student: Unmerged) -> np.ndarray:
        with student.cut(lesson.attention, lesson.activation) as model:
            return score(model, job.slices[1], batch_size=job.batch_size).losses

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


def _since(run: JointRun) -> str:
    """A sentence on the training after the removal."""
    steps = sum(run.start) * run.points.steps + len(run.losses)
    return (
        f"Without the removed\nparts it was trained for {steps} steps to predict what the dense model predicts, "
        "and then merged."
    )


def _sections(run: JointRun) -> dict[str, str]:
    """Heading and Markdown of each section between the list of removed parts and the gate."""
    decision = run.decision
    attention, activation = decision.chosen
    standing = (
        "The choice is certain as long as the noise is below its bound (`argmax_of_noise_lt_half_gap`)."
        if decision.certain
        else f"The choice is not certain: {int(decision.within.sum()) - 1} other pairs are within twice the noise, and "
        f"it can cost up to\n{decision.regret:.3g} (`regret_of_argmax_le`)."
    )
    what = "Top-1 accuracy" if run.measured_on.images else "Minus the loss in nats per token"
    pairs = "pair that meets it" if len(decision.pairs) == 1 else "pairs that meet it"
    lead = f"It leads the next by {decision.gap:.3g}. " if len(decision.pairs) > 1 else ""
    return {
        "Decision": f"""The budget is {decision.remove} to remove. Of {len(decision.pairs)} {pairs}, this is the one
with the largest predicted score after recovery: {attention} attentions and {activation} activations are removed.
{lead}The noise is at most {decision.noise:.3g}; the standard error
of a difference on the selection data is {decision.selection_error:.3g}.
{standing}
`{REPORT}` holds the points and the map behind this decision.""",
        "Score": f"""{what} on data that was not used above: {run.chosen:.4g}, dense {run.dense:.4g}.
The standard error of the difference, paired by item, is {run.error:.2g}. Measured on:

- {as_text(run.measured_on.line())}""",
        "Command": f"""On the data named above, with {_settings(run)}, and defaults for all options that are left out:

    {_command(run)}""",
    }


def _settings(run: JointRun) -> str:
    """The settings that only `remove_jointly` in Python takes."""
    points = run.points
    rank = "all weights trained" if points.recipe.rank is None else f"updates of rank {points.recipe.rank}"
    return (
        f"importance {run.importance.method}, {rank}, {points.steps} steps a point and {len(run.losses)} of the chosen "
        f"pair, {len(set(points.seeds.tolist()))} seeds a point from {points.seeds[0]} on"
    )


def _command(run: JointRun) -> str:
    """The command, as far as the results record it."""
    options = ["--remove", f"{run.decision.remove}", "--reduction", run.importance.reduction]
    return printable(shlex.join(["lyapunov-prune", "joint", run.plan.model.name, *options, "-o", "OUT"]))
