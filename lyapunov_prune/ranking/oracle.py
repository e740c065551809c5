"""Greedy removal by the loss itself: each step removes the layer whose removal raises perplexity least."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from torch import nn

from lyapunov_prune.arguments import Amount, Count, checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import layer_input
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import LayersGone
from lyapunov_prune.ranking.counts import count_of, protected_layers, require_count
from lyapunov_prune.ranking.ranking import Ranking
from lyapunov_prune.results.arrays import require_layers
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.changes import badness
from lyapunov_prune.sensitivity.sweep import DENSE, Job, Sweep

Candidates = Callable[[tuple[int, ...]], Collection[int]]


@dataclass(frozen=True)
class GreedyStep:
    """One removal: the layer, the mean loss of every window (nats) without it and its predecessors, and the cost.

    `forwards` counts the layers that computed for this step, trials included, in forwards of the dense model over the
    whole batch. `heads` counts the models that were scored; each applied the head once.
    """

    layer: int
    windows: np.ndarray
    forwards: float
    heads: int


@dataclass(frozen=True)
class GreedyRemoval(Ranking):
    """Layers in the order in which a greedy search removed them; `dense` is the dense loss of every window, in nats."""

    dense: np.ndarray
    steps: tuple[GreedyStep, ...]
    criterion: str
    measured_on: MeasuredOn

    what = "layers"

    def __post_init__(self) -> None:
        require_layers("greedy removal, steps", self.order, self.measured_on.model.num_layers)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(step.layer for step in self.steps)

    @property
    def losses(self) -> np.ndarray:
        """Mean loss in nats of the dense model and after each step, (1 + steps,)."""
        return np.array([self.dense.mean(), *(step.windows.mean() for step in self.steps)])

    @property
    def forwards(self) -> float:
        """The cost of the search in forwards of the dense model over the batch, without the heads."""
        return float(sum(step.forwards for step in self.steps))

    @checked
    def plan(self, remove: Amount) -> PruningPlan:
        """The plan that removes the first `remove` layers of the order.

        Its scores are the steps (0 was removed first), NaN for layers that stayed. Raises LyapunovPruneError if the
        search made fewer steps.
        """
        remove = count_of(remove, self.measured_on.model.num_layers)
        if not 1 <= remove <= len(self.steps):
            raise LyapunovPruneError(f"the search removed {len(self.steps)} layers, not {remove}; search further")
        scores = np.full(self.measured_on.model.num_layers, np.nan)
        scores[list(self.order)] = np.arange(len(self.order))
        return PruningPlan(
            gone=LayersGone(self.order[:remove]),
            criterion=self.criterion,
            alpha=None,
            scores=scores,
            model=self.measured_on.model,
            measured_on=(self.measured_on,),
        )

    def to_frame(self) -> pd.DataFrame:
        with np.errstate(over="ignore"):
            perplexity, degradation = np.exp(self.losses[1:]), np.exp(self.losses[1:] - self.losses[0])
        return pd.DataFrame(
            {
                "step": np.arange(1, len(self.steps) + 1),
                "layer": self.order,
                "perplexity": perplexity,
                "× dense": degradation,
                "forwards": [step.forwards for step in self.steps],
                "heads": [step.heads for step in self.steps],
            }
        )

    def answer(self) -> list[str]:
        with np.errstate(over="ignore"):
            times = np.exp(self.losses - self.losses[0])
        return [
            f"Removed one by one, each the least loss: layers {', '.join(map(str, self.order))}.",
            f"Perplexity {times[-1]:.3g} × dense without all {len(self.order)}, {times[1]:.3g} × without the first, on "
            "the text that chose them, so it is optimistic.",
            "Measure them on other text: prune, then eval --against.",
            self.measured_on.line(),
        ]

    def headline(self) -> str:
        return f"Greedy removal by {self.criterion}\n{self.measured_on.line()}"


@runs_model
def greedy_removal(
    model: InMemory,
    batch: Readable,
    remove: int,
    *,
    folder: str | Path | None = None,
    batch_size: Count = 1,
    protect: Sequence[int] = (),
    candidates: Candidates | None = None,
    criterion: str = "oracle",
) -> GreedyRemoval:
    """Remove `remove` layers of `model` one by one, each the one whose removal raises the loss on `batch` least.

    Each step is a `Sweep` of the model that skips the layers chosen so far. With L − n layers left it costs about
    (L − n) / 2 forwards of them, and L − n heads. Of equal losses the earlier layer is removed. `model` is untouched.

    Layers of `protect` stay. `candidates` returns the layers to try, given those removed so far; None tries all that
    are left. It is called while the removed layers are skipped, so its measurements on `model` see the pruned model.
    `criterion` names the search in plans and on disk.

    Finished steps and jobs are kept in `folder` (see `Store`) and not repeated by a later run; an interrupted step
    counts only the forwards after it continued. Raises LyapunovPruneError if `remove` leaves no layer, if a
    candidate was removed already, if no candidate leaves a finite loss, and as `Sweep` does.
    """
    reading = read(model, batch)
    batch, structure = reading.batch, reading.structure
    require_count(remove, structure.num_layers)
    measured_on = reading.measured_on()
    stay = protected_layers(structure.num_layers, protect, remove)
    about = {**measured_on.key, "criterion": criterion, "protect": stay}
    with Store(folder, "greedy removal", about) as store:
        removed: tuple[int, ...] = ()
        for number in range(remove):
            key = f"step {number}"
            if key not in store:
                with _computed_tokens(structure) as tokens:
                    also = {"removed": ",".join(map(str, removed))}
                    with (
                        reading.prefix.without(removed),
                        Sweep(model, batch, folder=folder, batch_size=batch_size, also=also) as sweep,
                    ):
                        tried = _tried(candidates, removed, set(range(structure.num_layers)) - {*removed, *stay})
                        jobs = [Job(f"remove {layer}", layer, remove=(layer,)) for layer in tried]
                        outcomes = sweep.run(jobs, f"step {number + 1} of {remove}")
                layer = min(tried, key=lambda k: badness(float(outcomes[f"remove {k}"].windows.mean())))
                windows = outcomes[f"remove {layer}"].windows
                if not np.isfinite(windows).all():
                    raise LyapunovPruneError(
                        f"no layer beside {', '.join(map(str, removed)) or 'none'} can be removed with a finite loss; "
                        "remove fewer, or load the model in a wider dtype"
                    )
                whole = structure.num_layers * batch.ids.numel()
                forwards = sum(gather_object([sum(tokens) / whole]))
                if number == 0:
                    store.add(DENSE, encode(outcomes[DENSE].windows))
                store.add(key, encode(GreedyStep(layer, windows, forwards, len(outcomes))))
            removed += (store[key]["layer"],)
        return GreedyRemoval(
            dense=decode(np.ndarray, store[DENSE]),
            steps=tuple(decode(GreedyStep, store[f"step {number}"]) for number in range(remove)),
            criterion=criterion,
            measured_on=measured_on,
        )


def _tried(candidates: Candidates | None, removed: tuple[int, ...], left: set[int]) -> list[int]:
    chosen = sorted(left if candidates is None else set(candidates(removed)))
    if not chosen or not left.issuperset(chosen):
        raise LyapunovPruneError(f"candidates {chosen} beside the removed {list(removed)}; name layers that are left")
    return chosen


@contextmanager
def _computed_tokens(structure: Structure) -> Iterator[list[int]]:
    """Within the block, collect the tokens of every layer call that computed (one of its parts was called too)."""
    tokens: list[int] = []
    computing: set[nn.Module] = set()

    def begins(layer: nn.Module, args: Any, kwargs: Any) -> None:
        computing.discard(layer)

    def ends(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if layer in computing:
            tokens.append(layer_input(args, kwargs)[..., 0].numel())

    def computes(layer: nn.Module) -> Callable[..., None]:
        return lambda module, args, kwargs: computing.add(layer)

    parts = [(part, computes(layer)) for layer in structure.layers for part in layer.children()]
    before = [*((layer, begins) for layer in structure.layers), *parts]
    with hooked(before=before, after=[(layer, ends) for layer in structure.layers]):
        yield tokens
