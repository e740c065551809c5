"""The bounds on KL: never broken by any change of logits, nearly attained by some, and broken when shrunk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax

from lyapunov_prune.bounds import probability as module
from lyapunov_prune.bounds.probability import kl_softmax_le_range, kl_softmax_le_variance, variance_bound
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.predictions.spaces import prediction_measures

logits = arrays(np.float64, 7, elements=st.floats(-60, 60))
changes = arrays(np.float64, 7, elements=st.floats(-1, 1))


def measured(z: np.ndarray, d: np.ndarray) -> dict[str, np.ndarray]:
    """What the program measures, from log-probabilities of another library."""
    rows = [torch.from_numpy(np.atleast_2d(log_softmax(x, axis=-1))) for x in (z, z + d)]
    _, _, half, kl, _, span, deviation, *_ = prediction_measures(*rows).numpy()
    return {"kl": kl, "span": span, "variance": 2 * half, "deviation": deviation}


def both(m: dict[str, np.ndarray]) -> list[module.BoundCheck]:
    checks = [kl_softmax_le_range(m["kl"], m["span"])]
    if (m["deviation"] <= 1).all():
        checks.append(kl_softmax_le_variance(m["kl"], m["variance"], m["deviation"]))
    return checks


@settings(max_examples=400)
@given(z=logits, d=changes, log_size=st.floats(-16, 3), shift=st.floats(-100, 100))
def test_no_change_of_any_size_breaks_a_bound(z: np.ndarray, d: np.ndarray, log_size: float, shift: float) -> None:
    for check in both(measured(z, 10**log_size * d + shift)):
        assert check.holds, str(check)


def test_the_range_bound_is_nearly_attained_and_breaks_when_shrunk() -> None:
    # All the mass on one token, which loses it to another: KL = max d − min d, but for the normaliser.
    z, d = np.array([50.0, 0.0]), np.array([-5e5, 5e5])
    m = measured(z, d)
    check = kl_softmax_le_range(m["kl"], m["span"], matrix="mlp of layer 3", layer=3)
    assert check.holds
    assert 0.999 < check.ratio < 1
    assert (check.theorem, check.layer, check.inputs) == ("kl_softmax_le_range", 3, 1)
    broken = kl_softmax_le_range(m["kl"], 0.9 * m["span"])  # planted fault
    assert not broken.holds
    assert "VIOLATED" in str(broken)


def test_the_variance_bound_is_nearly_attained_and_breaks_when_shrunk() -> None:
    rng = np.random.default_rng(0)
    m = measured(rng.normal(size=(50, 7)), 1e-3 * rng.normal(size=(50, 7)))
    check = kl_softmax_le_variance(m["kl"], m["variance"], m["deviation"])
    assert check.holds
    assert 0.99 < check.ratio < 1
    assert check.inputs == 50
    assert not kl_softmax_le_variance(m["kl"], 0.9 * m["variance"], m["deviation"]).holds  # planted fault


def test_without_its_remainder_the_estimate_is_no_bound() -> None:
    """One token in a hundred gains: the third moment is positive, and KL above half the variance."""
    m = measured(np.array([0.0, np.log(99)]), np.array([0.9, 0.0]))
    assert m["kl"] > m["variance"] / 2
    assert both(m)[1].holds
    assert not kl_softmax_le_variance(m["kl"], m["variance"], 0.0).holds  # planted fault


def test_the_bound_is_a_number_only_where_the_theorem_speaks() -> None:
    assert variance_bound([2.0, 2.0, 2.0], [0.9, 1.0, 1.1]).tolist()[:2] == [1.4, 2 * (1 / 2 + 2 / 9)]
    assert np.isnan(variance_bound(2.0, 1.1))
    with pytest.raises(LyapunovPruneError, match="the bound needs c ≤ 1"):
        kl_softmax_le_variance([0.1, 0.1], [0.2, 0.2], [0.5, 1.2])
    with pytest.raises(LyapunovPruneError, match="NaN"):
        kl_softmax_le_range([0.1, np.nan], [0.2, 0.2])


def test_margins_are_those_of_sums_over_a_vocabulary() -> None:
    unit = 2.0**-44
    check = kl_softmax_le_range(0.1, 0.5)
    assert check.margin == pytest.approx(unit * (0.5 + unit) + 2.0**-37 * 0.5, rel=1e-12, abs=0)
    check = kl_softmax_le_variance(0.3, 0.25, 0.5)
    assert check.margin == pytest.approx(unit * (0.5 + 0.3 + unit) + 2.0**-37 * check.bound, rel=1e-12, abs=0)
    # No span at all: what is left to rounding is the square of the unit.
    assert kl_softmax_le_range(0.9 * unit**2, 0.0).holds
    assert not kl_softmax_le_range(1.1 * unit**2, 0.0).holds
    assert kl_softmax_le_variance(0.0, 0.0, 1.0).holds  # c = 1 is spoken of
