"""The options of what is ranked, shared by `rank` and `prune`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from lyapunov_prune.cli import choices
from lyapunov_prune.cli.options import PROTECTED, layer_indices, one_of, what_option
from lyapunov_prune.cli.records import Given
from lyapunov_prune.ranking import counts
from lyapunov_prune.ranking.table import CRITERIA, default_criterion


def _criteria_of(part: str) -> str:
    return ", ".join(name for name, criterion in CRITERIA.items() if part in criterion.parts)


Criterion = Annotated[
    choices.Criterion | None,
    what_option(
        **one_of(
            CRITERIA,
            "How layers are chosen. Default: best if --remove gives the number of whole layers and the model is in "
            "memory, reap for experts, otherwise bi.",
        )
    ),
]
Protect = Annotated[
    str | None, PROTECTED, what_option(help="Layers to keep, as 0-2,-1 (negative numbers count from the end).")
]
What = Annotated[
    counts.What,
    what_option(
        metavar="NAME",
        help="\n\n".join(
            [
                "What is removed.",
                "layers: whole layers",
                f"attention: the attention of a layer, by {_criteria_of('attention')}; a compact checkpoint",
                "activation: that of the layers in prune --layers; a compact checkpoint",
                "width: hidden channels of all feed-forward blocks or experts; only prune",
                f"experts: the same number in every layer, by {_criteria_of('experts')}",
            ]
        ),
    ),
]


@dataclass(frozen=True)
class RankOptions:
    """What is ranked, and how."""

    what: What = "layers"
    criterion: Criterion = None
    protect: Protect = None

    def protected(self) -> list[int]:
        return layer_indices("--protect", self.protect) if self.protect is not None else []

    def settled(self, remove: float | None) -> Self:
        """These options with a criterion, the default if none is given; `remove` is None where no number is known."""
        return self if self.criterion else replace(self, criterion=default_criterion(remove, self.what))

    @property
    def goes_by(self) -> str:
        """The criterion, which is settled."""
        assert self.criterion is not None
        return self.criterion

    def require(self, given: Given, search: float | None = None) -> None:
        """Raise LyapunovPruneError, before torch is waited for, for options that the criterion does not take."""
        takes = CRITERIA[self.goes_by].options()
        if "search" not in takes:
            given.refuse(f"has no effect on --criterion {self.goes_by}; leave it out", "search")
        if self.what == "experts":
            given.refuse("applies to layers, and every layer loses the same number of experts; leave it out", "protect")
        CRITERIA.make(self.goes_by, **({"search": search} if "search" in takes else {}))

    @property
    def how(self) -> dict[str, Any]:
        """These options as arguments of `ranking.rank`."""
        return {"criterion": self.goes_by, "what": self.what, "protect": self.protected()}
