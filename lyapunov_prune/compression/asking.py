"""What is asked of a method and a schedule: amounts and options that they do not take are refused, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.compression.method import require_in_range
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError, first_of

if TYPE_CHECKING:
    from lyapunov_prune.allocation.allocation import Allocation

# What says the amount of a method of each unit, and an example of each.
_TAKES = {"sparsity": ("sparsity",), "rank": ("sparsity", "rank"), "bits": ("bits",)}
_EXAMPLES = {"sparsity": "--sparsity 0.5", "rank": "rank=8", "bits": "--bits 4"}


def require_amount(
    method: str, sparsity: float | None, rank: int | None, bits: float | None, allocation: str | Allocation
) -> str:
    """The unit of the amount. Raises LyapunovPruneError unless it is given exactly once and the method accepts it."""
    takes = _TAKES[METHODS[method].unit]
    told = {name: x for name, x in (("sparsity", sparsity), ("rank", rank), ("bits", bits)) if x is not None}
    if isinstance(allocation, str):
        given = [*told]
        shares: list[str] = [*_TAKES] if allocation == "uniform" else ["sparsity"]
    else:
        given, shares = [*told, allocation.unit], [allocation.unit]
    if not given:
        raise LyapunovPruneError(f"--method {method} needs an amount; give {_EXAMPLES[takes[0]]} with it")
    unit = given[0]
    others = [name for name, known in METHODS.items() if unit in _TAKES[known.unit]]
    own = [name for name in SCHEDULES if name == "uniform" or unit == "sparsity"]
    wrong = {
        f"{' and '.join(given)} say the amount of --method {method}; give one of them": len(given) > 1,
        f"--method {method} takes {' or '.join(takes)}, not {unit}; give {_EXAMPLES[takes[0]]}, or add --method "
        f"{', '.join(others[:-1])} or {others[-1]}": unit not in takes,
        f"allocation {allocation} does not share out {unit}; give {', '.join(own)}": unit not in shares,
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(why)
    if allocation == "uniform" and unit != "sparsity":
        require_in_range(method, unit, told[unit])
    return unit


def require_options(allocation: str | Allocation, options: Mapping[str, Any] | None) -> None:
    """Raise LyapunovPruneError unless the schedule has these parameters; an Allocation accepts none."""
    if isinstance(allocation, str):
        SCHEDULES.make(allocation, **(options or {}))
    elif options:
        raise LyapunovPruneError(f"the allocation is made; leave out {next(iter(options))}, or name a schedule")
