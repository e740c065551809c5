"""A run of healing: stretches of distillation, each judged on held-out windows, keeping the best weights."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from lyapunov_prune.errors import Diverged
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.forward.reading import read
from lyapunov_prune.forward.scoring import next_token_loss
from lyapunov_prune.healing.distillation import KEPT, Distillation, update_sizes
from lyapunov_prune.healing.memory import needed
from lyapunov_prune.healing.rounds import ROUNDS, TRIAL, Round, Stretch, best_of, next_stretch, rates
from lyapunov_prune.healing.sharded import gathered, gathered_into, in_parts_like, sharded
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.healing.trained import beside, drawn_order, recomputed, trained
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.device import free_memory
from lyapunov_prune.progress import track
from lyapunov_prune.results.encoding import decode, encode

_BEST, _DONE = "best", "done"
Tensors = Mapping[str, torch.Tensor]
Judge = Callable[[torch.Tensor], np.ndarray]


@dataclass(frozen=True)
class Budget:
    """Bounds of a run (`steps`, `minutes`, or both), its first learning rate, and the number of trial rates."""

    steps: int | None
    minutes: float | None
    rate: float
    trials: int


@dataclass
class Done:
    """The progress of a run besides its weights: the judged loss `before` it, its rounds, and its seconds so far.

    If only minutes are given, `steps` is None until the first trial has shown how many they allow.
    """

    before: np.ndarray
    steps: int | None
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Way:
    """How a student is trained; `heal` describes the fields, and `processes` are those that share the windows.

    If `narrow`, products are in bfloat16 where that changes little (`Distillation.narrow_if_close`).
    """

    budget: Budget
    per_step: int
    rank: int | None
    temperature: float
    seed: int
    shard: bool
    narrow: bool
    processes: PartialState

    @contextmanager
    def learner(
        self, student: PreTrainedModel, teacher: PreTrainedModel, window: torch.Tensor
    ) -> Iterator[tuple[PreTrainedModel, Distillation, Callable[[], PreTrainedModel]]]:
        """The model to train, its Distillation, and a function that returns the whole model after the block.

        If `needed` for a step on `window` is more than is free beside the teacher's states, layers are `recomputed`.
        """
        if self.shard:
            learner, guide = sharded(student, self.processes), sharded(teacher, self.processes)
        else:
            learner, guide = copy.deepcopy(student) if self.rank is None else beside(student), teacher
        with trained(learner, self.rank, self.seed) as parameters, ExitStack() as lighter:
            sizes = update_sizes(learner, parameters)
            run = Distillation(learner, guide, parameters, self.temperature, processes=self.processes, sizes=sizes)
            (narrow,) = self.of_main(self.narrow)  # for all: others may have another device
            if narrow:
                run.narrow_if_close(window)
                ((run.narrow, run.change),) = self.of_main((run.narrow, run.change))
            free = (1 - KEPT) * free_memory(str(learner.device))
            if learner.device.type == "cpu":
                free /= self.processes.num_processes
            with run.multiplying():
                (short,) = self.of_main(needed(learner, parameters, window) > free)
            if short:  # in all processes: they gather a sharded layer together, also to run it again
                lighter.enter_context(recomputed(learner))
            yield (learner, run, lambda: gathered_into(copy.deepcopy(student), learner) if self.shard else learner)

    def of_main(self, value: Any) -> list[Any]:
        """The value of the main process, in a list."""
        return broadcast_object_list([value]) if self.processes.num_processes > 1 else [value]

    def judge(self, learner: PreTrainedModel, ids: torch.Tensor) -> Judge:
        """A function for the mean next-token loss (nats) of each of some windows of `learner`, such as `ids`."""
        scorer = None if self.shard else read(wrap(learner), ids).scorer

        @torch.no_grad()
        def judged(ids: torch.Tensor) -> np.ndarray:
            windows = ids.to(learner.device).split(1)
            if scorer is None:  # calling a layer gathers it, so every process runs every window
                return np.array([next_token_loss(uncached_logits(learner, each)[0], each[0]) for each in windows])
            return np.array([scorer(each)[0][0] for each in windows])

        return judged


class Training:
    """Trains the parameters of `run` on the windows `ids`, as `way` says, in an order drawn from its seed.

    `judge` returns the mean loss of each judging window (nats per token) of the current model, and `start` holds the
    original parameters. `weights` are those of least judged loss so far. The run is saved in `state`, and continues
    from the `tensors` of a saved one (names and values, empty for a new run). All processes follow the rounds of the
    main one.
    """

    def __init__(
        self,
        run: Distillation,
        ids: torch.Tensor,
        judge: Callable[[], np.ndarray],
        start: Tensors,
        way: Way,
        state: TrainingState,
        tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        self.run, self.ids, self.start, self.weights, self.way = run, ids, start, start, way
        self._judge, self._state = judge, state
        self._durations: list[float] = []
        self._began = time.monotonic()
        told, best = None, dict[str, torch.Tensor]()
        for key, value in tensors:
            kind, _, name = key.partition("/")
            if kind == _DONE:
                told = bytes(value.cpu().tolist()).decode()
            elif kind == _BEST:
                best[name] = in_parts_like(value, run.parameters[name])
            else:
                run.go_on_from([(key, value)])
        if told is None:
            self.done = Done(self._judged(), way.budget.steps)
            require_numbers(self.done.before, "losses of the validation windows")
        else:
            self.done = decode(Done, json.loads(told))
            self.weights = best or start

    def finish(self) -> None:
        """Train until the rounds end.

        A stretch whose loss or gradient is not finite is judged as infinitely bad. Raises Diverged if that of the first
        step is not finite.
        """
        while (stretch := self._next()) is not None:
            judged = self._trained(stretch)
            done = self.done
            done.rounds.append(Round(stretch, judged))
            if best_of(done.rounds, done.before) == len(done.rounds) - 1:
                self.weights = self.run.copies()
            self._save_if_due()
        self._save()

    def _next(self) -> Stretch | None:
        done, budget = self.done, self.way.budget
        between = self.run.step == sum(each.stretch.steps for each in done.rounds)
        if budget.minutes is not None and between:  # a started stretch is completed
            self._count_time()
            if all(each.stretch.trial for each in done.rounds):
                (done.steps,) = self.way.of_main(self._affordable())
            (late,) = self.way.of_main(done.seconds >= 60 * budget.minutes)
            if late and done.rounds:
                return None
        return next_stretch(done.rounds, done.before, rate=budget.rate, steps=done.steps, trials=budget.trials)

    def _affordable(self) -> int | None:
        """Total steps that the minutes allow, estimated from the trials so far.

        Before the first trial, the steps of the budget, which may be None.
        """
        budget, trials = self.way.budget, len(self.done.rounds)
        if not trials or budget.minutes is None:
            return budget.steps
        taken, seconds = TRIAL * trials, self.done.seconds
        step = median(self._durations) if self._durations else seconds / taken
        judging = max(seconds - taken * step, 0.0) / (trials + 1)  # includes judging before training
        steps = taken + max(0, int((60 * budget.minutes - seconds - ROUNDS * judging) / step))
        return steps if budget.steps is None else min(steps, budget.steps)

    def _count_time(self) -> None:
        now = time.monotonic()
        self.done.seconds += now - self._began
        self._began = now

    def _trained(self, stretch: Stretch) -> np.ndarray:
        """The judged losses after a stretch, of which some steps may have been taken already."""
        run, rounds, per_step = self.run, self.done.rounds, self.way.per_step
        before = sum(each.stretch.steps for each in rounds)
        trials = sum(each.stretch.steps for each in rounds if each.stretch.trial)
        first = self._first(stretch)
        order = drawn_order(len(self.ids), (first + stretch.steps) * per_step, self.way.seed)
        taken = run.step - before
        if not taken and stretch.begin != "here":
            run.begin_anew(self.start if stretch.begin == "start" else self.weights)
        rate = rates(stretch, (self.done.steps or 0) - trials)
        number = sum(not each.stretch.trial for each in rounds) + 1
        what = f"healing, trying rate {stretch.rate:.1g}" if stretch.trial else f"healing, round {number}"
        for k in track(range(taken, stretch.steps), what):
            began = time.monotonic()
            at = (first + k) * per_step
            try:
                run.take_step(self.ids[order[at : at + per_step]], rate[k])
            except Diverged:
                if run.step == 0:  # not caused by the learning rate
                    raise
                run.losses += [math.nan] * (stretch.steps - k)
                return np.full_like(self.done.before, math.inf)
            self._durations.append(time.monotonic() - began)
            if k + 1 < stretch.steps:
                self._save_if_due()
        return self._judged()

    def untouched(self) -> list[int]:
        """The windows that no step has taken, after a round."""
        last = max(self._first(each.stretch) + each.stretch.steps for each in self.done.rounds)
        taken = drawn_order(len(self.ids), last * self.way.per_step, self.way.seed)
        return sorted({*range(len(self.ids))}.difference(taken))

    def _first(self, stretch: Stretch) -> int:
        """The number of the first step's windows in the order: those that the kept weights have not seen."""
        trials = any(each.stretch.trial for each in self.done.rounds)
        return stretch.taken + (TRIAL if trials and not stretch.trial else 0)

    def _judged(self) -> np.ndarray:
        (judged,) = self.way.of_main(self._judge())
        return judged

    def _save_if_due(self) -> None:
        (due,) = self.way.of_main(self._state.is_due())
        if due:
            self._save()

    def _save(self) -> None:
        self._count_time()
        told = torch.frombuffer(bytearray(json.dumps(encode(self.done)).encode()), dtype=torch.uint8)
        kept = {} if self.weights is self.start else self.weights
        best = {f"{_BEST}/{name}": gathered(value) for name, value in kept.items()}
        self._state.save(self.run.step, {**self.run.tensors(), **best, _DONE: told})
