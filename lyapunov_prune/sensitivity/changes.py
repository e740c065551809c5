"""What a study changes: matrices under a compression, or layers removed. Imports no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lyapunov_prune.compression.method import rank_for, require_in_range
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError

if TYPE_CHECKING:
    from lyapunov_prune.models.projections import Projection

BITS = 4  # bits per weight of a method that rounds, if not given
LEVELS = (8, 6, 4, 3, 2)  # a method that rounds uses these bits in place of rising sparsities


@dataclass(frozen=True)
class Compression:
    """Remove a share `sparsity` of the entries by `method`, then truncate to `rank`, if given.

    A low-rank method keeps `rank`, or by default the rank that leaves `1 − sparsity` of the parameters (`rank_for`);
    with a rank the sparsity is 0. A method that rounds keeps `bits` a weight (`BITS` if not given) at sparsity 0.

    Raises LyapunovPruneError for an unknown method and for an amount that is out of range or in a unit of other
    methods.
    """

    method: str
    sparsity: float
    rank: int | None
    bits: float | None = None

    def __post_init__(self) -> None:
        METHODS[self.method]  # raises for an unknown method
        require_in_range(self.method, "sparsity", self.sparsity)
        require_in_range(self.method, "rank", 1 if self.rank is None else self.rank)
        if self.rounds:
            object.__setattr__(self, "bits", BITS if self.bits is None else self.bits)
            require_in_range(self.method, "bits", self.bits)  # type: ignore[arg-type]
        other = "rank" if self.rounds else "bits"
        if getattr(self, other) is not None:
            raise LyapunovPruneError(f"method {self.method} takes no {other}; leave it out, or take another method")
        if self.rounds or (self.low_rank and self.rank is not None):
            object.__setattr__(self, "sparsity", 0.0)

    @property
    def low_rank(self) -> bool:
        return METHODS[self.method].unit == "rank"

    @property
    def rounds(self) -> bool:
        return METHODS[self.method].unit == "bits"

    @property
    def amount(self) -> str:
        """The label of a level: the bits of a method that rounds, otherwise the sparsity."""
        return f"{self.bits:g} bits" if self.rounds else f"sparsity {self.sparsity:g}"

    def levels(self, sparsities: Sequence[float]) -> list[Compression]:
        """This at each of `sparsities` (with the rank that follows from it), or at 8 to 2 bits if the method rounds."""
        if self.rounds:
            return [replace(self, bits=bits) for bits in LEVELS]
        return [Compression(self.method, s, None if self.low_rank else self.rank) for s in sparsities]

    def rank_of(self, shape: Sequence[int]) -> int:
        """The rank that a low-rank method keeps of a matrix; full rank if unchanged. Raises like `rank_for`."""
        rank = rank_for(shape, self.sparsity) if self.rank is None else self.rank
        return min(shape) if rank is None else min(rank, *shape)

    def __str__(self) -> str:
        if self.rounds:
            return f"{self.method}, {self.amount}"
        if self.low_rank:
            return f"{self.method}, " + (f"sparsity {self.sparsity:g}" if self.rank is None else f"rank {self.rank}")
        return f"{self.method}, sparsity {self.sparsity:g}, rank {self.rank or 'full'}"

    def kept(self, shape: Sequence[int]) -> float:
        """Multiplications per input, of the `m n` of a dense matrix: entries kept, or those of two factors if fewer.

        Rounding saves none.
        """
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
        kept = f"{c.bits:g} bits" if c.rounds else f"sparsity {float(c.sparsity)!r}, rank {c.rank or 'full'}"
        return f"{c.method}, {kept}: {len(self.matrices)} matrices, {hashlib.sha256(names.encode()).hexdigest()[:16]}"


def badness(loss: float) -> float:
    """A sort key: the mean loss, with NaN as infinity."""
    return math.inf if math.isnan(loss) else loss
