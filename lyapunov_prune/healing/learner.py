"""The model that learns: a copy of the student, low-rank factors beside it, or its shards; and what judges it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.forward.scoring import next_token_loss
from lyapunov_prune.healing.distillation import Distillation, update_sizes
from lyapunov_prune.healing.sharded import gathered_into, sharded
from lyapunov_prune.healing.trained import beside, recomputed, trained
from lyapunov_prune.healing.training import Budget
from lyapunov_prune.models.decoder import wrap


@dataclass(frozen=True)
class Way:
    """How a student is trained; `heal` describes the fields, and `processes` are those that share the windows."""

    budget: Budget
    per_step: int
    rank: int | None
    temperature: float
    seed: int
    checkpointing: bool
    shard: bool
    processes: PartialState

    @contextmanager
    def learner(
        self, student: PreTrainedModel, teacher: PreTrainedModel
    ) -> Iterator[tuple[PreTrainedModel, Distillation, Callable[[], PreTrainedModel]]]:
        """The model to train, its Distillation, and a function that returns the whole model after the block."""
        if self.shard:
            learner, guide = sharded(student, self.processes), sharded(teacher, self.processes)
        else:
            learner, guide = copy.deepcopy(student) if self.rank is None else beside(student), teacher
        lighter = recomputed(learner) if self.checkpointing else nullcontext()
        with trained(learner, self.rank, self.seed) as parameters, lighter:
            sizes = update_sizes(learner, parameters)
            run = Distillation(learner, guide, parameters, self.temperature, processes=self.processes, sizes=sizes)
            yield (learner, run, lambda: gathered_into(copy.deepcopy(student), learner) if self.shard else learner)

    def judge(self, learner: PreTrainedModel, judging: Reading) -> Callable[[], np.ndarray]:
        """A function for the mean next-token loss (nats) of each judging window of `learner`, (windows,) float64."""
        if not self.shard:
            judging = read(wrap(learner), judging.batch)
            scorer, windows = judging.scorer, judging.windows(1)

        @torch.no_grad()
        def judged() -> np.ndarray:
            if self.shard:  # calling a layer gathers it, so every process runs every window
                each = (ids[None].to(learner.device) for ids in judging.batch.ids)
                return np.array([next_token_loss(uncached_logits(learner, ids)[0], ids[0]) for ids in each])
            return np.array([scorer(ids)[0][0] for ids in windows])

        return judged
