"""Healing: a pruned model learns from the dense one what the removed layers did."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Seed, checked
from lyapunov_prune.checkpoints.cards import as_text
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
from lyapunov_prune.forward.logits import require_temperature
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.sharded import gathered_into, of_main, require_shardable, sharded, sharing
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.healing.trained import beside, drawn_order, recomputed, require_trainable, trained
from lyapunov_prune.models.launched import processes_of, require_same_models
from lyapunov_prune.models.plain import require_plain
from lyapunov_prune.models.structure import identify, in_eval_mode
from lyapunov_prune.progress import track
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.history import add_step
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Result, encode

# SmolLM2-135M without four layers: a third of the full rate is worse, thrice is no better (experiments, 44).
FULL_RATE, LOW_RANK_RATE = 1e-4, 2e-3
REPORT = "healing.json"  # beside the weights of a healed checkpoint


@dataclass(frozen=True)
class HeldOut:
    """Perplexity on the same held-out windows: the pruned model, the healed one, and the dense one."""

    before: Perplexity
    after: Perplexity
    teacher: Perplexity


@dataclass(frozen=True)
class Healing(Result):
    """What healing did. `losses` holds the distillation loss before each step, of its windows, in nats a token.

    A step takes `per_step` windows. `rank` is None when all parameters of the layers were trained; `trained` counts
    them, or those of the factors. `measured_on` is of the pruned model and the text that it learnt from. `held_out` is
    None without evaluation text.
    """

    losses: np.ndarray
    rank: int | None
    learning_rate: float
    temperature: float
    trained: int
    teacher: ModelIdentity
    held_out: HeldOut | None
    measured_on: MeasuredOn
    per_step: int = 1

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def recovered(self) -> float | None:
        """`(PPL_before − PPL_after) / (PPL_before − PPL_teacher)`: 1 when all that the removal cost is back.

        None without evaluation text, NaN when the removal had cost nothing.
        """
        if self.held_out is None:
            return None
        before, after, teacher = (p.value for p in (self.held_out.before, self.held_out.after, self.held_out.teacher))
        return (before - after) / (before - teacher) if before > teacher else float("nan")

    def about(self) -> str:
        """What a model card says of it."""
        lost = self.recovered is not None and math.isfinite(self.recovered)
        recovered = f", which recovered {self.recovered:.0%} of the perplexity lost" if lost else ""
        headline = "\n".join(map(as_text, self.headline().splitlines()))
        return f"{headline}\n\n{self.steps} steps of distillation from {as_text(self.teacher.name)}{recovered}."

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"step": np.arange(self.steps), "loss": self.losses})

    def summary(self) -> pd.DataFrame:
        """The loss at the two ends, a tenth of the steps each, and the held-out perplexities."""
        tenth = math.ceil(self.steps / 10)
        row = {
            "steps": self.steps,
            "trained": self.trained,
            "first losses": self.losses[:tenth].mean(),
            "last losses": self.losses[-tenth:].mean(),
        }
        if self.held_out is not None:
            row |= {
                "perplexity": self.held_out.before.value,
                "healed": self.held_out.after.value,
                "dense": self.held_out.teacher.value,
                "recovered": self.recovered,
            }
        return pd.DataFrame([row])

    def headline(self) -> str:
        trained = "all parameters of the layers" if self.rank is None else f"updates of rank {self.rank}"
        held_out = [] if self.held_out is None else [f"held out: {self.held_out.after.measured_on.line()}"]
        rates = f"learning rate {self.learning_rate:g}, temperature {self.temperature:g}"
        rates += f", {self.per_step} windows a step" if self.per_step > 1 else ""
        return "\n".join([f"Healing by {trained}, {rates}", self.measured_on.line(), *held_out])


@dataclass(frozen=True)
class Healed:
    model: PreTrainedModel
    report: Healing


@checked
@in_eval_mode
def heal(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batch: Readable,
    *,
    steps: int = 100,
    per_step: int = 1,
    rank: int | None = None,
    learning_rate: float | None = None,
    temperature: float = 1.0,
    seed: Seed = 0,
    folder: str | Path | None = None,
    resume: bool = False,
    evaluation: Readable | None = None,
    batch_size: int = 1,
    checkpointing: bool = False,
    shard: bool = False,
) -> Healed:
    """A copy of `student` trained for `steps` to predict what `teacher` predicts, and a report; both stay untouched.

    Each step takes `per_step` windows of `batch` (in an order drawn from `seed`, every window once before any twice)
    and lowers `T²·mean_t KL(teacher ‖ student)` over their tokens (`distillation.py`) by AdamW without weight decay,
    gradients clipped to norm 1, the learning rate rising for a tenth of the steps and falling along a cosine. Both
    models run without dropout.

    Without `rank` all parameters of the layers are trained, with it low-rank updates of their matrices
    (`low_rank.py`), merged at the end. Embeddings and head stay those of the teacher: they were not removed, are
    often one tensor, and most of their rows stand for tokens that a short text never shows. `learning_rate` is
    1e-4 for the former, 2e-3 for the latter unless given. With `rank` the weights may be in half precision: they are
    not copied before they are merged, and factors and optimizer are in float32. With `checkpointing` layers run again
    for the backward pass, instead of keeping what it needs; the result is the same.

    The windows of a step go through the models one by one, their gradients are added. Under `accelerate launch` the
    processes share them: every one holds both models and ends with the same student, that of one process up to
    rounding. With `shard` a process holds but its part of the layers of both on its device (its GPU, if there is one),
    with gradients and moments of the same parts, and gathers a layer to run it (`sharded.py`); both models are on the
    CPU, where they are scored, and so is the healed one. Not with `rank`, whose factors are small.

    The state is kept in `folder` about every 20 seconds and at the end; with `resume` the run goes on from there, and
    on the CPU, with as many threads, ends as if it had never stopped, bit for bit. It holds the trained tensors
    three times over; delete it when the model is saved. A folder that holds anything of that name but no header of
    such a run, or in which another run is at work, is refused. `evaluation` is text to measure what was recovered on,
    `batch_size` of its windows in a forward.

    Raises LyapunovPruneError for a student in half precision without `rank`, adapters or packed weights, another
    vocabulary, tokens outside it, fewer than one step, more windows in all than 10 million, fewer of a step than
    processes (with `shard`: no multiple of them, one process, or a model that is not on the CPU), text that both
    batches share, evaluation text that the models were made with, a state of another run, and a loss or gradient that
    is not finite, naming the step.
    """
    require_plain(student)
    reading = read(student, batch)
    taught = read(teacher, reading)
    learning_rate = require_settings(steps, rank, learning_rate, temperature)
    processes = sharing(per_step, rank) if shard else processes_of(student, teacher)
    if shard:
        require_same_models(processes, student, teacher)
    _require(reading, taught, rank)
    if shard:
        require_shardable(student, "the pruned model")
        require_shardable(teacher, "the dense model")
    if per_step < processes.num_processes:
        raise LyapunovPruneError(
            f"steps of {per_step} windows cannot be shared by {processes.num_processes} (one a process); give as many "
            "or more (--per-step)"
        )
    if evaluation is not None:
        evaluation = read(student, evaluation)
        require_disjoint(reading.batch, evaluation.batch)
        for model in (student, teacher):
            require_unseen(model, evaluation.batch)

    order = drawn_order(len(reading.batch.ids), steps * per_step, seed)
    measured_on = reading.measured_on(seed)
    settings: dict[str, Any] = {"steps": steps, "per_step": per_step, "rank": rank}
    settings |= {"learning_rate": learning_rate, "temperature": temperature}
    about: dict[str, Any] = {}
    if folder is not None:
        guided_by = identify(teacher)
        about = {"teacher": [guided_by.weights, guided_by.settings], **encode(measured_on), **settings}
    with TrainingState(folder if processes.is_main_process else None, about, resume=resume) as state:
        tensors = state.load()
        if evaluation is not None:  # first, so that text on which a model fails costs no training
            before = perplexity(student, evaluation, batch_size=batch_size, description="perplexity, pruned")
            dense = perplexity(teacher, evaluation, batch_size=batch_size, description="perplexity, dense")
        state.hold()
        if shard:
            learner, guide = sharded(student, processes), sharded(teacher, processes)
        else:
            learner, guide = copy.deepcopy(student) if rank is None else beside(student), teacher
        with trained(learner, rank, seed) as parameters, recomputed(learner) if checkpointing else nullcontext():
            run = Distillation(learner, guide, parameters, learning_rate, temperature, steps, processes=processes)
            run.go_on_from(of_main(tensors, processes))
            del tensors
            for step in track(range(run.step, steps), "healing"):
                run.take_step(reading.batch.ids[order[step * per_step : (step + 1) * per_step]])
                (due,) = broadcast_object_list([state.is_due()]) if shard else (state.is_due(),)
                if due:
                    state.save(run.step, run.tensors())
            state.save(run.step, run.tensors())
        model = gathered_into(copy.deepcopy(student), learner) if shard else learner
    held_out = None
    if evaluation is not None:
        after = perplexity(model, evaluation, batch_size=batch_size, description="perplexity, healed")
        held_out = HeldOut(before, after, dense)
    report = Healing(
        losses=np.array(run.losses),
        rank=rank,
        learning_rate=learning_rate,
        temperature=temperature,
        trained=sum(p.numel() for p in parameters.values()),
        teacher=identify(teacher),
        held_out=held_out,
        measured_on=measured_on,
        per_step=per_step,
    )
    add_step(model, "heal", (measured_on,), student, teacher)
    return Healed(model, report)


def require_settings(steps: int, rank: int | None, learning_rate: float | None, temperature: float) -> float:
    """The learning rate, which is that of `heal` if it is None. Raises LyapunovPruneError as `heal` does."""
    if steps < 1:
        raise LyapunovPruneError(f"{steps} steps heal nothing; give 1 or more")
    if learning_rate is None:
        learning_rate = FULL_RATE if rank is None else LOW_RANK_RATE
    if not 0 < learning_rate < float("inf"):
        raise LyapunovPruneError(f"learning rate {learning_rate:g}; give a positive number")
    require_temperature(temperature)
    return learning_rate


def _require(reading: Reading, taught: Reading, rank: int | None) -> None:
    require_trainable(reading.model, "the pruned model", rank)
    sizes = [r.structure.config.vocab_size for r in (reading, taught)]
    if sizes[0] != sizes[1]:
        raise LyapunovPruneError(
            f"the pruned model has a vocabulary of {sizes[0]} and the dense one of {sizes[1]}; give the dense model "
            "that it was made from"
        )
