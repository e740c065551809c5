"""The request to `shrink`, and the time that is left for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.tasks import Task
from lyapunov_prune.models.left_out import require_whole
from lyapunov_prune.models.plain import plain
from lyapunov_prune.results.store import Store
from lyapunov_prune.shrinking.cost import TASK, Estimate, answering_seconds, estimated
from lyapunov_prune.shrinking.target import Target, count_for
from lyapunov_prune.shrinking.texts import Texts

_LEAST_SEARCH = 4.0  # the fewest forwards in which a search finds anything
_LEAST_STEPS = 8  # healing is skipped if there is no time for this many steps


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `shrink`.

    `items` are the items of the target's task: those that choose layers, and those that are held out. `search` is the
    number of forwards that the choice may spend, `steps` the number of healing steps; None derives both from the model
    and the minutes. `text`, `judge` and `source` are the command-line options that name the text to learn from and the
    second text that judges, and that say how the model is loaded.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    target: Target
    texts: Texts
    items: tuple[Task, Task] | None = None
    search: float | None = None
    steps: int | None = None
    minutes: float | None = None
    seed: int = 0
    batch_size: int = 1
    folder: Path | None = None
    text: tuple[str, ...] = ()
    judge: tuple[str, ...] = ()
    source: tuple[str, ...] = ()

    def require(self) -> None:
        """Raise LyapunovPruneError for every request that can be refused before anything is measured."""
        plain(self.model)
        require_whole(self.model)
        self.texts.require(self.model)

    def count(self) -> int | None:
        """The number of layers to remove; None if only the choice itself can tell."""
        return count_for(self.target, self.model) if self.target.is_counted else None

    def estimate(self, remove: int | None) -> Estimate:
        """The estimated cost of removing `remove` layers."""
        return estimated(
            self.model,
            self.target,
            self.texts,
            remove,
            search=self.search,
            steps=self.steps,
            answering=0.0 if self.items is None else answering_seconds(self.model, self.tokenizer, *self.items),
            minutes=self.minutes,
        )


class Clock:
    """The time that is left of `minutes`, counted over all runs that resumed each other; endless if None."""

    def __init__(self, minutes: float | None, store: Store) -> None:
        self.store = store
        self._end = math.inf if minutes is None else 60 * minutes
        self._began = time.monotonic() - store.items().get("spent", 0.0)

    def left(self) -> float:
        return self._end - (time.monotonic() - self._began)

    def once(self, key: str, value: Callable[[], Any]) -> Any:
        """`value`, decided once: a resumed run gets the value of the first run."""
        if key not in self.store:
            self.store.add(key, value())
        self.store.add("spent", time.monotonic() - self._began)
        return self.store[key]


def search_forwards(expected: Estimate, clock: Clock) -> float | None:
    """The forwards that choosing may spend: half of the time that no other step needs; None for the usual number.

    Raises LyapunovPruneError if the time is too short to choose anything.
    """
    if clock.left() == math.inf:
        return None
    usual, seconds = expected.search, expected.seconds
    forward = seconds["choosing layers"] / usual  # in each of the searches
    others = ("writing the text", "mending", TASK, "evaluation", "check and files")
    fixed = sum(seconds.get(step, 0.0) for step in others)
    affordable = (clock.left() - fixed) / 2 / forward
    if affordable < _LEAST_SEARCH:
        least = (fixed + 2 * _LEAST_SEARCH * forward) / 60
        raise LyapunovPruneError(
            f"too few minutes to choose any layers: choosing and evaluating take about {least:.1f} of them here; give "
            f"--minutes {math.ceil(10 * least) / 10:g} or more"
        )
    return round(min(usual, affordable), 1)


def healing_minutes(expected: Estimate, clock: Clock) -> float | None:
    """The minutes that are left for healing; 0 if they are too few, None for no bound."""
    if clock.left() == math.inf:
        return None
    seconds = clock.left() - expected.seconds["evaluation"] - expected.seconds["check and files"]
    return round(seconds / 60, 2) if seconds >= _LEAST_STEPS * expected.step_seconds else 0.0
