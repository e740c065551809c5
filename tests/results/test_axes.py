"""Fields of results that declare their axes: what does not fit is refused when the result is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.result import Result


@dataclass(frozen=True)
class Measured(Result):
    layers: int
    names: Annotated[tuple[str, ...], Per("matrix")]
    size: Annotated[np.ndarray, Per("matrix")]
    state: Annotated[np.ndarray, Per("layer+1", "window", finite=False)]
    by: Annotated[dict[str, np.ndarray], Per("layer", least=-1, most=1)]
    gone: Annotated[tuple[int, ...], Per(None, below="layer")] = ()
    windows: Annotated[np.ndarray | None, Per("window", 2)] = None


FITS: dict[str, Any] = {
    "layers": 2,
    "names": ("a", "b", "c"),
    "size": np.ones(3),
    "state": np.full((3, 4), np.nan),
    "by": {"token": np.array([-1.0, 1.0])},
}


def test_what_fits_is_taken_and_has_a_table() -> None:
    found = Measured(**FITS, gone=(1,), windows=np.zeros((4, 2)))
    assert found.to_frame().to_dict("list") == {"matrix": [0, 1, 2], "names": ["a", "b", "c"], "size": [1.0] * 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": np.ones(2)},
        {"size": np.array([1.0, 1.0, np.nan])},
        {"size": np.array([1.0, 1.0, -1.0])},
        {"size": np.ones((3, 1))},
        {"state": np.zeros((2, 4))},
        {"by": {"token": np.zeros(2), "energy": np.zeros(3)}},
        {"by": {"token": np.array([0.0, 1.5])}},
        {"gone": (0, 2)},
        {"gone": (-1,)},
        {"windows": np.zeros((3, 2))},
        {"windows": np.zeros((4, 3))},
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LyapunovPruneError):
        Measured(**{**FITS, **wrong})
