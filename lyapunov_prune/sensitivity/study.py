"""The base class of studies, lists of changes that are measured one after another. Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from lyapunov_prune.registry import Choice
from lyapunov_prune.sensitivity.changes import Change, Compression, badness

if TYPE_CHECKING:
    from lyapunov_prune.models.projections import Projection

Matrices = tuple["Projection", ...]


@dataclass(frozen=True)
class StudyRequest:
    """What a study is asked: the matrices of the model, the setting `base`, and the losses measured so far, by key."""

    matrices: Matrices
    base: Compression
    losses: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def layers(self) -> dict[int, Matrices]:
        """The matrices of each layer, in their order."""
        from lyapunov_prune.models.projections import by_layer

        return {layer: tuple(ps) for layer, ps in by_layer(self.matrices).items()}

    def badness(self, change: Change) -> float:
        """A sort key: the measured loss of a change, with NaN as infinity."""
        return badness(self.losses[change.key])


class Study(Choice):
    """A list of changes that belong together. A study is a subclass in a file of its own and a row in `table.STUDIES`.

    `after_groups`: its changes depend on the results of the study `group`. `in_all`: it is cheap enough to be part of
    `all`. `takes` names the settings that it uses (the amount is a sparsity, or bits); others do not affect it.
    """

    after_groups: ClassVar[bool] = False
    in_all: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("method", "amount", "rank")

    @abstractmethod
    def changes(self, asked: StudyRequest) -> list[Change]:
        """The changes of the matrices under the setting `base` (structural sensitivity, §5 and §6.1).

        With `after_groups`, `losses` are those of every group compressed alone. A study that depends on its own losses
        returns the changes it needs next, until all of them are measured.
        """
