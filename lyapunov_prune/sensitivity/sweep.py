"""Many small changes of one model, each measured by its loss on one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Count
from lyapunov_prune.evaluation.perplexity import require_finite_losses
from lyapunov_prune.forward.dealing import shared_out, summed, windows_of
from lyapunov_prune.forward.hooks import residual_stream
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.forward.replacement import replaced
from lyapunov_prune.models.decoder import Model, in_memory
from lyapunov_prune.models.launched import alone, processes_of, require_alike, sharing
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import track
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.drift import Reference


@dataclass(frozen=True)
class Job:
    """One change: some matrices replaced, or some layers removed.

    `key` identifies it permanently and uniquely. `tokens` is how many tokens of each window are run, from its first on;
    None is all.
    """

    key: str
    first: int  # the first layer that changes
    weights: Callable[[], Mapping[Projection, torch.Tensor]] | None = None
    remove: tuple[int, ...] = ()
    tokens: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a change: mean loss of every window in nats, and `1 − CKA` of the inputs of the head.

    `drift` is NaN of a job that runs only some tokens of each window.
    """

    windows: np.ndarray
    drift: float


DENSE = "dense"


class Sweep:
    """Measures jobs on the windows of one batch.

    Every forward begins at the first layer that changes, with the dense hidden state of that boundary: a sweep over all
    L layers costs about L / 2 forwards of the layers, and L of the head. The dense states of all boundaries are kept (L
    × tokens × width).

    Finished jobs are kept in `folder` and not measured again if the model, the text and `also` (what the changes depend
    on) are the same. Under `accelerate launch` every process takes its share of the jobs of each `run`, or of the
    windows if the jobs are fewer than the processes, and all receive all results.
    """

    def __init__(
        self,
        model: Model,
        batch: Readable,
        *,
        folder: str | Path | None = None,
        batch_size: Count = 1,
        also: Mapping[str, str | None] | None = None,
    ) -> None:
        self.reading = read(in_memory(model), batch)
        self._processes = processes_of(self.reading.model)
        self.measured_on = self.reading.measured_on()
        require_alike(self._processes, "texts", [self.measured_on.text_hash, also])
        self._store = Store(folder, "sweep", {**self.measured_on.key, **(also or {})})
        for others in gather_object([self._store.items()]):  # all processes must split the same list
            self._store.learn(others)
        self._ids = windows_of(self.reading, batch_size)
        self._windows = range(0)  # the batches of which this process holds the dense states

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *error: object) -> None:
        self._store.close()

    @property
    def dense(self) -> np.ndarray:
        """Mean loss of every window of the unchanged model, in nats."""
        return self.run([])[DENSE].windows

    @torch.no_grad()
    def run(self, jobs: Iterable[Job], description: str = "sweep") -> dict[str, Outcome]:
        """The outcome of every job by key, and that of the dense model as `dense`.

        Raises NonFiniteError when a loss of the dense model is not finite; for a change that makes it so, the outcome
        is NaN or infinity.
        """
        wanted = {job.key: job for job in [Job(DENSE, 0), *jobs]}
        pending = sorted((job for key, job in wanted.items() if key not in self._store), key=lambda job: job.first)
        count = self._processes.num_processes
        many = len(pending) >= count or len(self._ids) < count
        mine = pending[self._processes.process_index :: count] if many else pending
        if mine:
            with alone() if many else nullcontext():
                in_eval_mode(self._measure_all)(self.reading.model, mine, description)
        outcomes = {job.key: self._store[job.key] for job in mine}
        for others in gather_object([outcomes]):
            self._store.learn(others)
        return {key: decode(Outcome, self._store[key]) for key in wanted}

    def _measure_all(self, model: PreTrainedModel, jobs: list[Job], description: str) -> None:
        self._prepare()
        layers = self.reading.structure.num_layers
        for job in track(jobs, description, cost=lambda job: 1 + layers - job.first):
            self._store.add(job.key, encode(self._measure(job)))

    def _prepare(self) -> None:
        """Losses and final states of the dense model on the windows of this process, before its first job on them."""
        mine, among = range(len(self._ids)), sharing(self.reading.model)
        if among is not None:
            mine = mine[among.process_index :: among.num_processes]
        if mine == self._windows:
            return
        self._prefix, self._scorer = self.reading.prefix, self.reading.scorer
        self._states: dict[int, list[torch.Tensor]] = {entry: [] for entry in self._prefix.entries}
        with residual_stream(self.reading.structure, self._keep, one_state=False, every_layer=False):
            losses, finals = self._score(0)
        require_finite_losses(self.reading, losses)
        self._reference = Reference(finals, partial(summed, self.reading.model))
        self._dense = Outcome(losses, self._reference.drift(finals))
        self._windows = mine

    def _keep(self, boundary: int, hidden: torch.Tensor) -> None:
        if boundary in self._states:
            self._states[boundary].append(hidden)

    def _measure(self, job: Job) -> Outcome:
        if job.key == DENSE:
            return self._dense
        with self._changed(job):
            losses, finals = self._score(self._prefix.entry(job.first), job.tokens)
        return Outcome(losses, self._reference.drift(finals) if job.tokens is None else float("nan"))

    def _score(self, at: int, tokens: int | None = None) -> tuple[np.ndarray, list[torch.Tensor]]:
        """The loss of the first `tokens` of every window, and the final states of those that this process scored."""
        finals: list[torch.Tensor] = []

        def score(number: int) -> list[float]:
            state = self._states[at][self._windows.index(number)][:, :tokens] if at else torch.empty(0)
            with self._prefix.entered(at, state) if at else nullcontext():
                losses, final = self._scorer(self._ids[number][:, :tokens])
            finals.append(final)
            return losses

        each = shared_out(self.reading, range(len(self._ids)), score, "")
        return np.array([loss for losses in each for loss in losses]), finals

    @contextmanager
    def _changed(self, job: Job) -> Iterator[None]:
        with ExitStack() as stack:
            if job.weights is not None:
                stack.enter_context(replaced(self.reading.model, job.weights()))
            stack.enter_context(self._prefix.without(job.remove))
            yield
