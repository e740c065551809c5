"""What a study changes: matrices under a compression, or layers removed. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lyapunov_prune.compression.method import rank_for
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError

if TYPE_CHECKING:
    from lyapunov_prune.models.projections import Projection

STUDY_METHODS = {name: method for name, method in METHODS.items() if method.unit in ("sparsity", "rank")}


@dataclass(frozen=True)
class Compression:
    """Remove a share `sparsity` of the entries by `method`, then truncate to `rank`, if given.

    A low-rank method keeps `rank`, or by default the rank that leaves `1 − sparsity` of the parameters (`rank_for`);
    with a rank the sparsity is 0.
    """

    method: str
    sparsity: float
    rank: int | None

    def __post_init__(self) -> None:
        if self.method not in STUDY_METHODS:
            raise LyapunovPruneError(f"unknown method {self.method!r}; give one of {', '.join(STUDY_METHODS)}")
        if not 0 <= self.sparsity <= 1 or (self.rank is not None and self.rank < 1):
            raise LyapunovPruneError(f"{self}: give a sparsity of 0 to 1 and a rank of 1 or more")
        if self.low_rank and self.rank is not None:
            object.__setattr__(self, "sparsity", 0.0)

    @property
    def low_rank(self) -> bool:
        return STUDY_METHODS[self.method].unit == "rank"

    def at(self, sparsity: float) -> Compression:
        """The same at another sparsity (and the rank that follows from it)."""
        return Compression(self.method, sparsity, None if self.low_rank else self.rank)

    def rank_of(self, shape: Sequence[int]) -> int:
        """The rank that a low-rank method keeps of a matrix; full rank if unchanged. Raises like `rank_for`."""
        rank = rank_for(shape, self.sparsity) if self.rank is None else self.rank
        return min(shape) if rank is None else min(rank, *shape)

    def __str__(self) -> str:
        if self.low_rank:
            return f"{self.method}, " + (f"sparsity {self.sparsity:g}" if self.rank is None else f"rank {self.rank}")
        return f"{self.method}, sparsity {self.sparsity:g}, rank {self.rank or 'full'}"

    def kept(self, shape: Sequence[int]) -> float:
        """Multiplications per input, out of the `m n` of a dense matrix: entries kept, or two factors if fewer."""
        m, n = shape[-2:]
        if self.low_rank:
            return min(m * n, self.rank_of((m, n)) * (m + n))
        entries = (1 - self.sparsity) * m * n
        return entries if self.rank is None else min(entries, self.rank * (m + n))


@dataclass(frozen=True)
class Change:
    """One experiment of a study: `matrices` under `compression`, or the layers `remove` left out."""

    study: str
    label: str
    matrices: tuple[Projection, ...] = ()
    compression: Compression | None = None
    remove: tuple[int, ...] = ()

    @property
    def layer(self) -> int | None:
        """The layer, if there is only one."""
        layers = {p.layer for p in self.matrices} | set(self.remove)
        return layers.pop() if len(layers) == 1 else None

    @property
    def component(self) -> str | None:
        """The component, if there is only one."""
        components = {p.component for p in self.matrices}
        return components.pop() if len(components) == 1 else None

    @property
    def key(self) -> str:
        """Equal for equal changes of different studies, so that each is measured once."""
        if self.remove:
            return f"remove {','.join(map(str, self.remove))}"
        assert self.compression is not None
        c, names = self.compression, ",".join(sorted(p.name for p in self.matrices))
        setting = f"{c.method}, sparsity {float(c.sparsity)!r}, rank {c.rank or 'full'}"
        return f"{setting}: {len(self.matrices)} matrices, {hashlib.sha256(names.encode()).hexdigest()[:16]}"
