"""Healing: train a pruned model to predict what the dense model predicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
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
from lyapunov_prune.evaluation.judging import POWER, Judgement, Losses, decided, ends, parted, require_windows
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.forward.logits import require_one_vocabulary
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.healing.report import Healed, Healing, HeldOut
from lyapunov_prune.healing.rounds import best_of
from lyapunov_prune.healing.sharded import of_main, require_shardable, sharing
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.healing.trained import require_few, require_trainable
from lyapunov_prune.healing.training import Budget, Judge, Tensors, Training, Way
from lyapunov_prune.models.decoder import Decoder, InMemory, runs_models
from lyapunov_prune.models.device import multiplies_bfloat16
from lyapunov_prune.models.launched import processes_of, require_same_models
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.history import add_step
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity

# First learning rate, relative to the size of each parameter: all parameters, low-rank factors.
RATE, LOW_RANK_RATE = 5e-4, 1.6e-3
TRIALS = 6  # largest number of rates
STEPS = 100
MORE = 3  # untouched windows that help to decide, for each judging window


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows to learn from, and the text that judges, with the numbers of its windows that judge each round.

    `others` are the numbers in that text of those to learn from; empty if another text judges.
    """

    learnt: Reading
    text: Reading
    judging: list[int]
    others: list[int]

    @property
    def judged(self) -> Reading:
        return replace(self.text, batch=self.text.batch.take(self.judging))


@runs_models
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
    shard: bool = False,
) -> Healed:
    """Train a copy of `student` to predict what `teacher` predicts; returns it and a report. Both inputs are unchanged.

    The copy is never worse than `student`: the windows of `judge`, or one in eight of `batch`, are only used for
    judging. Training goes in rounds; after each, the next-token loss of the judging windows is measured, and the
    weights of least judged loss are kept. If a paired test over the windows does not confirm a gain over `student`
    (`Healing.gain`), the copy is `student` itself and `report.kept` is −1. A test that is not clear gets more windows
    (`judging.decided`): up to MORE times as many of those that no step has taken.

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
    because factors and optimizer are in float32. If memory is short (`memory.needed`), layers are run again in the
    backward pass instead of storing their activations; the result is the same.

    The steps of a float32 model multiply in bfloat16 on a device that has instructions for it
    (`device.multiplies_bfloat16`), unless that changes the loss of the first window by more than CLOSE
    (`distillation.py`); weights, gradients, optimizer and all that is judged stay in float32. The report says so.

    The windows of a step run one by one and their gradients are added. Under `accelerate launch` the processes share
    the windows: each holds both models, and the result equals that of one process up to rounding. With `shard` a
    process holds only its shards of the layers of both models on its device (its GPU, if there is one), with gradients
    and optimizer state, and gathers a layer to run it (`sharded.py`); both models are on the CPU, where they are
    scored, and so is the healed one. `shard` excludes `rank`, whose factors are small.

    The training state is kept in `folder` about every 20 seconds and at the end. A later run of the same settings
    continues from it; on the CPU, with the same number of threads and without `minutes`, it ends bit for bit as if it
    had not been interrupted. The state holds the trained tensors four times; delete it when the model is saved.
    `evaluation` is text on which the recovery is measured, `batch_size` windows per forward.

    Raises LyapunovPruneError for a student in half precision without `rank`, adapters or packed weights, another
    vocabulary, tokens outside it, fewer than 8 windows without `judge`, fewer than 4 in it, fewer than one step, no
    time, more than 10 million windows in all, fewer windows per step than processes (with `shard`: not a multiple of
    them, one process, or a model that is not on the CPU), text shared with the judging text, evaluation text that the
    models were made with, another run at work on the same training, and a loss or gradient of the first step that is
    not finite.
    """
    reading = read(student, batch)
    taught = read(teacher, reading)
    budget = budget_of(steps, minutes, rank, learning_rate, per_step)
    processes = _processes(reading, taught, per_step, rank, shard)
    device = processes.device if shard else student.model.device
    narrow = student.model.dtype == torch.float32 and multiplies_bfloat16(device)
    way = Way(budget, per_step, rank, temperature, seed, shard, narrow, processes)
    windows = _windows(reading, judge)
    judging = windows.judged
    if evaluation is not None:
        evaluation = read(student, evaluation)
        _require_unseen(evaluation, (reading, judging), (student.model, teacher.model))
    on = reading.measured_on(seed), judging.measured_on()
    model, report = _healed(student, teacher, windows, on, way, folder, evaluation, batch_size)
    if report.kept >= 0:
        add_step(model, "heal", on[:1] if judge is None else on, student.model, teacher.model)
    return Healed(model, report)


def _healed(
    student: Decoder,
    teacher: Decoder,
    windows: Windows,
    on: tuple[MeasuredOn, MeasuredOn],
    way: Way,
    folder: str | Path | None,
    evaluation: Reading | None,
    batch_size: int,
) -> tuple[PreTrainedModel, Healing]:
    """Continue the run that `folder` holds, or begin one; measure the perplexities around it."""
    guided_by = teacher.identity  # reads all weights, so only once
    about = {} if folder is None else _about(guided_by, on, way)
    with TrainingState(folder if way.processes.is_main_process else None, about) as state:
        tensors = state.load()
        if evaluation is not None:  # first, to fail before the training
            before = perplexity(student, evaluation, batch_size=batch_size, description="perplexity, pruned")
            dense = perplexity(teacher, evaluation, batch_size=batch_size, description="perplexity, dense")
        state.hold()
        model, report = _trained(student, teacher, windows, way, state, tensors, on, guided_by)
    if evaluation is not None:
        after = perplexity(model, evaluation, batch_size=batch_size, description="perplexity, healed")
        report = replace(report, held_out=HeldOut(before, after, dense))
    return model, report


def _trained(
    student: Decoder,
    teacher: Decoder,
    windows: Windows,
    way: Way,
    state: TrainingState,
    tensors: dict[str, torch.Tensor],
    on: tuple[MeasuredOn, MeasuredOn],
    guided_by: ModelIdentity,
) -> tuple[PreTrainedModel, Healing]:
    """Train from `start`, or on from the saved `tensors`, which are cleared; the weights are the best if that pays."""
    with way.learner(student.model, teacher.model, windows.learnt.batch.ids[:1]) as (learner, run, finish):
        # All parameters: those of the student, which does not change. Low-rank factors: copies, which are small.
        start: Tensors = dict(student.layers.named_parameters()) if way.rank is None else run.copies()
        saved = of_main(tensors, way.processes)
        judging = windows.judged.batch.ids
        judge = way.judge(learner, judging)
        training = Training(run, windows.learnt.batch.ids, partial(judge, judging), start, way, state, saved)
        tensors.clear()
        training.finish()
        report = Healing(
            losses=np.array(run.losses),
            rounds=tuple(training.done.rounds),
            judged=training.done.before,
            rank=way.rank,
            temperature=way.temperature,
            trained=sum(p.numel() for p in run.parameters.values()),
            teacher=guided_by,
            held_out=None,
            measured_on=on[0],
            judged_on=on[1],
            per_step=way.per_step,
            decision=_decision(training, windows, judge),
            narrow=run.narrow,
            change=run.change,
        )
        run.begin_anew(start if report.kept < 0 else training.weights)
    return finish(), report


def _decision(training: Training, windows: Windows, judge: Judge) -> Judgement | None:
    """Of the original weights and the best ones, by the windows of the rounds, and if those do not decide by more."""
    rounds, before = training.done.rounds, training.done.before
    best = best_of(rounds, before)
    if best < 0:
        return None

    def losses(some: list[int]) -> Losses:
        if some == windows.judging:
            return before, rounds[best].judged
        ids, found = windows.text.batch.take(some).ids, []
        for weights in (training.start, training.weights):
            training.run.begin_anew(weights)
            found += training.way.of_main(judge(ids))
        return found[0], found[1]

    spare = [windows.others[window] for window in training.untouched()] if windows.others else []
    more = [spare[k] for k in ends(len(spare), min(len(spare), MORE * len(before)))] if spare else []
    sets = [windows.judging, sorted([*windows.judging, *more])]
    seen, first, last, level = decided(sets if len(more) >= len(before) else sets[:1], losses)
    return Judgement(first, last, windows.text.batch.take(seen).measured_on(windows.text.decoder), level)


def _about(guided_by: ModelIdentity, on: tuple[MeasuredOn, MeasuredOn], way: Way) -> dict[str, Any]:
    """All that the numbers of a run depend on."""
    about: dict[str, Any] = {"teacher": guided_by.key, **on[0].key, **encode(way.budget)}
    about |= {"per_step": way.per_step, "rank": way.rank, "temperature": way.temperature, "narrow": way.narrow}
    return about | {"judged_on": on[1].text_hash}


def budget_of(
    steps: int | None, minutes: float | None, rank: int | None, learning_rate: float | None, per_step: int
) -> Budget:
    """The budget of a run, with STEPS if neither steps nor minutes are given. Raises like `require_few`."""
    steps = STEPS if steps is None and minutes is None else steps
    require_few(per_step * (steps or 0))
    if learning_rate is None:
        return Budget(steps, minutes, RATE if rank is None else LOW_RANK_RATE, TRIALS)
    return Budget(steps, minutes, learning_rate, 0 if minutes is None else 1)


def _processes(reading: Reading, taught: Reading, per_step: int, rank: int | None, shard: bool) -> PartialState:
    """The processes that share the windows of a step.

    Raises LyapunovPruneError if both models cannot be trained so: `heal` lists the reasons.
    """
    student, teacher = reading.model, taught.model
    processes = sharing(per_step, rank) if shard else processes_of(student, teacher)
    if shard:
        require_same_models(processes, student, teacher)
    require_trainable(student, "the pruned model", rank)
    require_one_vocabulary(*(r.structure.config.vocab_size for r in (reading, taught)))
    if shard:
        require_shardable(student, "the pruned model")
        require_shardable(teacher, "the dense model")
    if per_step < processes.num_processes:
        raise LyapunovPruneError(
            f"steps of {per_step} windows cannot be shared by {processes.num_processes} (one a process); give as many "
            "or more (per_step)"
        )
    return processes


def _require_unseen(evaluation: Reading, used: tuple[Reading, ...], models: tuple[PreTrainedModel, ...]) -> None:
    """Raise LyapunovPruneError if the evaluation text shares tokens with what was `used`, or the models saw it."""
    for other in used:
        require_disjoint(other.batch, evaluation.batch)
    for model in models:
        require_unseen(model, evaluation.batch)


def _windows(reading: Reading, judge: Readable | None) -> Windows:
    if judge is None:
        others, judging = parted(reading.batch, least=POWER)
        return Windows(replace(reading, batch=reading.batch.take(others)), reading, judging, others)
    text = read(reading.decoder, judge)
    require_windows(text.batch)
    require_disjoint(reading.batch, text.batch)
    return Windows(reading, text, list(range(len(text.batch))), [])
