"""The target: a number of layers, a share of the parameters, or the loss that is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.ranking.counts import count_of, require_count
from lyapunov_prune.results.worth import GENTLE, GOOD

if TYPE_CHECKING:  # a target that cannot be must not wait for torch
    from transformers import PreTrainedModel

OPTIONS = {
    "remove": "--remove 25%",
    "max_kl": "--max-kl 0.5",
    "max_drop": "--max-drop gsm8k:0.02",
}


@dataclass(frozen=True)
class Target:
    """The target: `by` is one of OPTIONS, `value` its value; `max_drop` also names the `task` that is scored.

    Where none is given it is `gentle`: as many layers as cost less than 10 % more perplexity.
    """

    by: Literal["remove", "max_kl", "max_drop", "gentle"]
    value: float
    task: str | None = None

    @classmethod
    def of(
        cls,
        remove: int | float | None = None,
        max_kl: float | None = None,
        max_drop: str | None = None,
    ) -> Target:
        """The one target that is given, `gentle` for none. Raises LyapunovPruneError for two, or a bad `max_drop`."""
        given = {"remove": remove, "max_kl": max_kl, "max_drop": max_drop}
        named = [name for name, value in given.items() if value is not None]
        if not named:
            return cls("gentle", GOOD)
        if len(named) != 1:
            both = " and ".join(OPTIONS[name].split()[0] for name in named)
            raise LyapunovPruneError(f"{both} are {len(named)} targets; give one of {', '.join(OPTIONS.values())}")
        if remove is not None:
            return cls("remove", remove)
        if max_kl is not None:
            return cls("max_kl", max_kl)
        assert max_drop is not None
        task, colon, drop = max_drop.rpartition(":")
        try:
            value = float(drop)
        except ValueError:
            value = math.nan
        if not (task and colon) or not 0 < value < 1:
            raise LyapunovPruneError(f"{max_drop!r} is no task and drop; write it as gsm8k:0.02")
        return cls("max_drop", value, task)

    @property
    def is_counted(self) -> bool:
        """Whether the number of layers follows from the model alone, before any layer is chosen."""
        return self.by == "remove"

    def told(self) -> str:
        """The target as a phrase, for example `25% of the layers`."""
        layers = f"{self.value:.0%} of the layers" if self.value < 1 else f"{self.value:g} layers"
        return {
            "remove": "1 layer" if self.value == 1 else layers,
            "max_kl": f"at most {self.value:g} nats a token from the dense predictions",
            "max_drop": f"a score of {self.task} at most {self.value:g} lower",
            "gentle": GENTLE,
        }[self.by]

    def option(self) -> list[str]:
        """The target as command-line options."""
        name = f"--{self.by.replace('_', '-')}"
        return [name, f"{self.task}:{self.value:g}" if self.task else f"{self.value:g}"]


def count_for(target: Target, model: PreTrainedModel) -> int:
    """How many layers of `model` go by a target that `is_counted`; raises LyapunovPruneError if so many cannot."""
    from lyapunov_prune.models.structure import find_structure

    layers = find_structure(model).num_layers
    count = count_of(int(target.value) if target.value >= 1 else target.value, layers)
    require_count(count, layers)
    return count
