"""The axes of the arrays in results, declared with the field: `rho: Annotated[np.ndarray, Per("layer")]`."""

from __future__ import annotations

import functools
from typing import Annotated, Any, get_type_hints

import numpy as np

from lyapunov_prune.results.arrays import require_array


class Per:
    """The axes of an array, or of a tuple, and what its numbers may be (`require_array`; `below`: the size of an axis).

    An axis is a name, or a size. `layer` is as long as the model has layers, any other name as long as the first field
    that has it; `layer+1` is one longer. None is of any length. A dictionary holds arrays of the same axes.
    """

    def __init__(self, *axes: str | int | None, below: str | None = None, **limits: Any) -> None:
        self.axes, self.below, self.limits = axes, below, limits


PerLayer = Annotated[np.ndarray, Per("layer")]
PerBoundary = Annotated[np.ndarray, Per("layer+1")]  # before the first layer, between two, and behind the last
Loose = Annotated[np.ndarray, Per("layer", finite=False)]  # NaN and infinity are allowed
LayerNumbers = Annotated[tuple[int, ...], Per(None, below="layer")]


@functools.cache
def declared(kind: type) -> dict[str, Per]:
    """The fields of a result that declare their axes."""
    hints = get_type_hints(kind, include_extras=True).items()
    found = ((name, part) for name, hint in hints for part in getattr(hint, "__metadata__", ()))
    return {name: part for name, part in found if isinstance(part, Per)}


def require_axes(record: object) -> None:
    """Raise LyapunovPruneError for a field of a result that does not fit what it declares."""
    measured = (getattr(getattr(record, "measured_on", None), "model", None), getattr(record, "model", None))
    counts = (*(getattr(model, "num_layers", None) for model in measured), getattr(record, "layers", None))
    known = [count for count in counts if isinstance(count, int)]
    sizes = {"layer": known[0]} if known else {}

    def size(axis: str | int | None, given: int) -> int:
        if not isinstance(axis, str):
            return given if axis is None else axis
        name, _, more = axis.partition("+")
        return sizes.setdefault(name, given - int(more or 0)) + int(more or 0)

    for name, per in declared(type(record)).items():  # type: ignore[arg-type]
        value = getattr(record, name)
        parts = {f" of {key}": part for key, part in value.items()} if isinstance(value, dict) else {"": value}
        for of, part in parts.items():
            if part is None:
                continue
            array = part if isinstance(part, np.ndarray) else _numbers(part)
            given = (*array.shape, *[0] * len(per.axes))
            shape = tuple(map(size, per.axes, given))
            limits = per.limits if per.below is None else {"most": size(per.below, 0) - 1, **per.limits}
            require_array(f"{type(record).__name__}, {name}{of}", array, shape, **limits)


def _numbers(values: tuple[Any, ...]) -> np.ndarray:
    """A tuple as an array; of other things than numbers only the length counts."""
    return np.array(values) if all(isinstance(value, int | float) for value in values) else np.zeros(len(values))
