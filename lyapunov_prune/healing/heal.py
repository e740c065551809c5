"""Healing: train a pruned model to predict what the dense model predicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Count, Positive, Seed
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.forward.logits import require_one_vocabulary, uncached_logits
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.forward.scoring import next_token_loss
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.report import Healed, Healing, HeldOut
from lyapunov_prune.healing.sharded import gathered_into, of_main, require_shardable, sharded, sharing
from lyapunov_prune.healing.sizes import update_sizes
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.healing.trained import beside, recomputed, require_few, require_trainable, trained
from lyapunov_prune.healing.training import Budget, Tensors, Training
from lyapunov_prune.models.decoder import InMemory, takes_models, wrap
from lyapunov_prune.models.launched import processes_of, require_same_models
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.results.history import add_step
from lyapunov_prune.results.result import encode

# First learning rate, relative to the size of each parameter: all parameters, low-rank factors.
RATE, LOW_RANK_RATE = 5e-4, 1.6e-3
TRIALS = 6  # largest number of rates
STEPS = 100


@takes_models
@in_eval_mode
def heal(
    student: Plain,
    teacher: InMemory,
    batch: Readable,
    *,
    steps: Count | None = None,
    minutes: Positive | None = None,
    per_step: Count = 1,
    rank: Count | None = None,
    learning_rate: Positive | None = None,
    temperature: Positive = 1.0,
    seed: Seed = 0,
    folder: str | Path | None = None,
    judge: Readable | None = None,
    evaluation: Readable | None = None,
    batch_size: Count = 1,
    checkpointing: bool = False,
    shard: bool = False,
) -> Healed:
    """Train a copy of `student` to predict what `teacher` predicts; returns it and a report. Both inputs are unchanged.

    The copy is never worse than `student`: the windows of `judge`, or every eighth window of `batch`, are only used for
    judging. Training goes in rounds; after each, the next-token loss of the judging windows is measured, and the
    weights of least judged loss are kept. If a paired test over the windows does not confirm a gain over `student`
    (`Healing.gain`), the copy is `student` itself and `report.kept` is −1.

    Each step takes `per_step` windows of `batch` (in an order drawn from `seed`, every window once before any is
    repeated) and minimises `T²·mean_t KL(teacher ‖ student)` over their tokens (`distillation.py`) by AdamW without
    weight decay, with gradients clipped to norm 1. A learning rate is relative: each step moves a parameter by about
    this share of its root mean square (`update_sizes`). Without `learning_rate` the peak rate is searched
    (`rounds.next_stretch`): several rates are tried for a few steps each from the same weights. Dropout is off. `steps`
    and `minutes` bound the training including trials and judging, and the tighter one applies; the default is 100
    steps.

    Without `rank` all parameters of the layers are trained, with it low-rank updates of their matrices (`low_rank.py`),
    merged at the end. Embeddings and head stay those of the teacher: they were not removed, are often tied, and most of
    their rows are for tokens that a short text does not contain. With `rank` the weights may be in half precision,
    because factors and optimizer are in float32. `checkpointing` recomputes layers in the backward pass instead of
    storing their activations; the result is the same.

    The windows of a step run one by one and their gradients are added. Under `accelerate launch` the processes share
    the windows: each holds both models, and the result equals that of one process up to rounding. With `shard` a
    process holds only its shards of the layers of both models on its device (its GPU, if there is one), with gradients
    and optimizer state, and gathers a layer to run it (`sharded.py`); both models are on the CPU, where they are
    scored, and so is the healed one. `shard` excludes `rank`, whose factors are small.

    The training state is kept in `folder` about every 20 seconds and after each round. A later run of the same settings
    continues from it; on the CPU, with the same number of threads and without `minutes`, it ends bit for bit as if it
    had not been interrupted. The state holds the trained tensors four times; delete it when the model is saved. A
    folder is refused if it holds state files without the header of a healing run, or if another run is at work in it.
    `evaluation` is text on which the recovery is measured, `batch_size` windows per forward.

    Raises LyapunovPruneError for a student in half precision without `rank`, adapters or packed weights, another
    vocabulary, tokens outside it, a batch of one window without `judge`, fewer than one step, no time, more than 10
    million windows in all, fewer windows per step than processes (with `shard`: not a multiple of them, one process, or
    a model that is not on the CPU), text shared with the judging text, evaluation text that the models were made with,
    a state of another run, and a loss or gradient of the first step that is not finite.
    """
    reading = read(student, batch)
    taught = read(teacher, reading)
    budget = budget_of(steps, minutes, rank, learning_rate, per_step)
    processes = sharing(per_step, rank) if shard else processes_of(student.model, teacher.model)
    if shard:
        require_same_models(processes, student.model, teacher.model)
    _require(reading, taught, rank)
    if shard:
        require_shardable(student.model, "the pruned model")
        require_shardable(teacher.model, "the dense model")
    if per_step < processes.num_processes:
        raise LyapunovPruneError(
            f"steps of {per_step} windows cannot be shared by {processes.num_processes} (one a process); give as many "
            "or more (per_step)"
        )
    learnt, judging = _apart(reading, judge)
    if evaluation is not None:
        evaluation = read(student, evaluation)
        for other in (reading, judging):
            require_disjoint(other.batch, evaluation.batch)
        for model in (student.model, teacher.model):
            require_unseen(model, evaluation.batch)

    measured_on, judged_on = reading.measured_on(seed), judging.measured_on()
    settings: dict[str, Any] = {**encode(budget), "per_step": per_step, "rank": rank, "temperature": temperature}
    guided_by = teacher.identity  # reads all weights, so only once
    about: dict[str, Any] = {}
    if folder is not None:
        about = {"teacher": [guided_by.weights, guided_by.settings], **encode(measured_on), **settings}
        about["judged_on"] = encode(judged_on)
    with TrainingState(folder if processes.is_main_process else None, about) as state:
        tensors = state.load()
        if evaluation is not None:  # first, to fail before the training
            before = perplexity(student, evaluation, batch_size=batch_size, description="perplexity, pruned")
            dense = perplexity(teacher, evaluation, batch_size=batch_size, description="perplexity, dense")
        state.hold()
        with _learner(student.model, teacher.model, rank, seed, temperature, checkpointing, processes, shard) as (
            learner,
            run,
            finish,
        ):
            # All parameters: those of the student, which does not change. Low-rank factors: copies, which are small.
            start: Tensors = dict(student.layers.named_parameters()) if rank is None else run.copies()
            training = Training(
                run,
                learnt.batch.ids,
                _judge(learner, judging, shard),
                start,
                budget,
                per_step=per_step,
                seed=seed,
                state=state,
                tensors=of_main(tensors, processes),
                processes=processes,
            )
            del tensors
            training.finish()
            report = Healing(
                losses=np.array(run.losses),
                rounds=tuple(training.done.rounds),
                judged=training.done.before,
                rank=rank,
                temperature=temperature,
                trained=sum(p.numel() for p in run.parameters.values()),
                teacher=guided_by,
                held_out=None,
                measured_on=measured_on,
                judged_on=judged_on,
                per_step=per_step,
            )
            run.begin_anew(start if report.kept < 0 else training.weights)
        model = finish()
    if evaluation is not None:
        after = perplexity(model, evaluation, batch_size=batch_size, description="perplexity, healed")
        report = replace(report, held_out=HeldOut(before, after, dense))
    if report.kept >= 0:
        seen = (measured_on,) if judge is None else (measured_on, judged_on)
        add_step(model, "heal", seen, student.model, teacher.model)
    return Healed(model, report)


def budget_of(
    steps: int | None, minutes: float | None, rank: int | None, learning_rate: float | None, per_step: int
) -> Budget:
    """The budget of a run, with STEPS if neither steps nor minutes are given. Raises like `require_few`."""
    steps = STEPS if steps is None and minutes is None else steps
    require_few(per_step * (steps or 0))
    if learning_rate is None:
        return Budget(steps, minutes, RATE if rank is None else LOW_RANK_RATE, TRIALS)
    return Budget(steps, minutes, learning_rate, 0 if minutes is None else 1)


def _require(reading: Reading, taught: Reading, rank: int | None) -> None:
    require_trainable(reading.model, "the pruned model", rank)
    require_one_vocabulary(*(r.structure.config.vocab_size for r in (reading, taught)))


def _apart(reading: Reading, judge: Readable | None) -> tuple[Reading, Reading]:
    """The windows to train on, and those to judge by."""
    if judge is None:
        return apart(reading)
    judging = read(reading.decoder, judge)
    require_disjoint(reading.batch, judging.batch)
    return reading, judging


def _judge(learner: PreTrainedModel, judging: Reading, shard: bool) -> Callable[[], np.ndarray]:
    """A function for the mean next-token loss (nats) of each judging window of `learner`, (windows,) float64."""
    if not shard:
        judging = read(wrap(learner), judging.batch)
        scorer, windows = judging.scorer, judging.windows(1)

    @torch.no_grad()
    def judged() -> np.ndarray:
        if shard:  # calling a layer gathers it, so every process runs every window
            each = (ids[None].to(learner.device) for ids in judging.batch.ids)
            return np.array([next_token_loss(uncached_logits(learner, ids)[0], ids[0]) for ids in each])
        return np.array([scorer(ids)[0][0] for ids in windows])

    return judged


@contextmanager
def _learner(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    rank: int | None,
    seed: int,
    temperature: float,
    checkpointing: bool,
    processes: PartialState,
    shard: bool,
) -> Iterator[tuple[PreTrainedModel, Distillation, Callable[[], PreTrainedModel]]]:
    """The model to train, its Distillation, and a function that returns the whole model after the block."""
    if shard:
        learner, guide = sharded(student, processes), sharded(teacher, processes)
    else:
        learner, guide = copy.deepcopy(student) if rank is None else beside(student), teacher
    with trained(learner, rank, seed) as parameters, recomputed(learner) if checkpointing else nullcontext():
        sizes = update_sizes(learner, parameters)
        run = Distillation(learner, guide, parameters, temperature, processes=processes, sizes=sizes)
        yield learner, run, lambda: gathered_into(copy.deepcopy(student), learner) if shard else learner
