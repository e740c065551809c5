"""The base class of studies, lists of changes that are measured one after another. Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from lyapunov_prune.registry import Choice
from lyapunov_prune.sensitivity.changes import Change, Compression

if TYPE_CHECKING:
    from lyapunov_prune.models.projections import Projection

Projections = tuple["Projection", ...]


class Study(Choice):
    """A list of changes that belong together. A study is a subclass in a file of its own and a row in `table.STUDIES`.

    `after_groups`: its changes depend on the results of the study `group`. `in_all`: it is cheap enough to be part of
    `all`. `takes` names the settings that it uses (the amount is a sparsity, or bits); others do not affect it.
    """

    after_groups: ClassVar[bool] = False
    in_all: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("method", "amount", "rank")

    @abstractmethod
    def changes(self, ps: Projections, base: Compression, losses: Mapping[str, float]) -> list[Change]:
        """The changes of the matrices `ps` under the setting `base` (structural sensitivity, §5 and §6.1).

        `losses` are the measured losses by key: with `after_groups`, those of every group compressed alone. A study
        that depends on its own losses returns the changes it needs next, until all of them are measured.
        """


def by_layer(ps: Projections) -> dict[int, Projections]:
    """The matrices of each layer, in the order of `ps`."""
    return {k: tuple(p for p in ps if p.layer == k) for k in dict.fromkeys(p.layer for p in ps)}
