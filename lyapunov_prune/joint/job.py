"""What all parts of a joint removal share: the model with its cuts, the data, what was asked, and the time used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lyapunov_prune.data.examples import Examples
from lyapunov_prune.joint.chains import Pair
from lyapunov_prune.joint.decision import within_budget
from lyapunov_prune.joint.recovery import RecoveryRecipe
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.result import MeasuredOn, R
from lyapunov_prune.results.store import once


@dataclass(frozen=True, eq=False)
class JointJob:
    """One joint removal; `remove_jointly` describes what is asked.

    `origins` are the records of the three `slices`, `most` is how many attentions and activations can be removed, and
    `seconds` is filled with the time of each part.
    """

    student: Unmerged
    slices: tuple[Examples, Examples, Examples]
    origins: tuple[MeasuredOn, ...]
    most: Pair
    remove: int
    steps: int
    recover_steps: int
    recipe: RecoveryRecipe
    seeds: int
    seed: int
    folder: Path
    batch_size: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        return len(self.student.blocks)

    @property
    def about(self) -> dict[str, Any]:
        """All that the numbers depend on."""
        return {
            "slices": [origin.key for origin in self.origins],
            "remove": self.remove,
            "reduction": self.student.reduction,
            "recipe": encode(self.recipe),
            "steps": [self.steps, self.recover_steps],
            "seeds": [self.seed, self.seeds],
        }

    @property
    def pairs(self) -> list[Pair]:
        """The pairs of as many parts as go."""
        return [(a, g) for a, g in within_budget(self.layers, self.remove, self.most).tolist()]

    def once(self, name: str, kind: type[R], measure: Callable[[], R]) -> R:
        """The result that an earlier run of this job left in the folder under `name`, or a new one, which is kept."""
        return once(self.folder / f"{name}.json", kind, self.origins[0], self.about, measure)

    def timing(self, part: str) -> AbstractContextManager[None]:
        """Keep the time of the block in `seconds`."""
        return timed(self.seconds, part)


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Keep in `seconds` how long the block took, if it ends without an error."""
    began = time.monotonic()
    yield
    seconds[part] = time.monotonic() - began
