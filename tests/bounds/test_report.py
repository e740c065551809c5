"""What a report makes of its checks: the worst over settings, what was not seen, and what fails it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import as_batch
from transformers import PreTrainedModel

from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.check import check_bounds
from lyapunov_prune.bounds.decision import TokenCertificate
from lyapunov_prune.bounds.report import BoundsReport, RatioDistribution, Setting, Violation


def test_quantiles_and_counts_are_those_of_the_sorted_ratios() -> None:
    some = np.array([0.0, 0.04, 0.05, 0.0999, 0.1, 0.949, 0.951, 1.0, 1.5])
    found = RatioDistribution.of([some, np.zeros(0), np.array([0.52])])
    counts = [0] * 21
    for ratio in (*some, 0.52):
        counts[sum(ratio >= edge for edge in np.arange(1, 21) / 20)] += 1
    assert found.counts.tolist() == counts
    assert (counts[0], counts[1], counts[2], counts[18], counts[19], counts[20]) == (2, 2, 1, 1, 1, 2)
    everything = sorted((*some, 0.52))
    near = everything[8] + 0.91 * (everything[9] - everything[8])  # at 0.99 · 9 of ten
    np.testing.assert_allclose(found.overall, [0, (everything[4] + everything[5]) / 2, near, 1.5])
    np.testing.assert_allclose(found.quantiles[0], [0, 0.1, 1.0 + 0.92 * 0.5, 1.5])
    assert np.isnan(found.quantiles[1]).all()
    assert found.quantiles[2].tolist() == [0.52] * 4
    columns = found.columns()
    assert {name: column[2] for name, column in columns.items()} == {"least": 0.52, "median": 0.52, "quantile_99": 0.52}
    np.testing.assert_allclose([column[0] for column in columns.values()], found.quantiles[0, :3])
    assert "10 inputs with a bound above zero: least 0, median 0.31" in found.headline()


def test_of_no_ratios_there_are_no_quantiles() -> None:
    found = RatioDistribution.of([np.zeros(0)])
    assert np.isnan(found.overall).all()
    assert found.counts.tolist() == [0] * 21


HOLDS = BoundCheck("t", "b", 0, error=1.0, bound=2.0, margin=0.0, inputs=3)
BROKEN = replace(HOLDS, error=3.0)


@pytest.fixture
def report(llama: PreTrainedModel, ids: torch.Tensor) -> BoundsReport:
    nan = np.nan
    return BoundsReport(
        method="magnitude",
        settings=(Setting(0.5, None, 0.0), Setting(0.7, 8, 0.1)),
        names=("a", "b", "c"),
        components=("x", "x", "y"),
        layers=(0, 0, 1),
        theorems=("one",),
        ratio=np.array([[0.1, 0.6, nan], [0.4, 0.2, nan]]),
        attained=np.array([[0.9, 0.7, 0.8], [0.95, nan, 0.5]]),
        hits=2,
        inputs=30,
        violations=(),
        composition=(),
        contraction=(),
        gamma=nan,
        decisions=None,
        measured_on=as_batch(llama, ids).measured_on(llama),
    )


def test_the_worst_over_all_settings_is_shown(report: BoundsReport) -> None:
    violations = (Violation(report.settings[0], BROKEN), Violation(report.settings[1], BROKEN))
    frame = replace(report, violations=violations).to_frame()
    np.testing.assert_array_equal(frame["worst_ratio"], [0.4, 0.6, np.nan])
    np.testing.assert_array_equal(frame["attained"], [0.95, 0.7, 0.8])
    assert frame["violations"].tolist() == [0, 2, 0]
    assert report.checks == 6
    assert report.unseen == ("c",)
    assert replace(report, ratio=np.array([[0.1, np.nan, 0.3], [0.4, 0.2, 0.3]])).unseen == ("b",)


def test_a_component_has_the_worst_of_its_matrices(report: BoundsReport) -> None:
    found = replace(
        report,
        ratio=np.array([[0.1, 0.6, 0.3]]),
        attained=np.array([[0.9, 0.7, 0.8]]),
        violations=(Violation(None, BROKEN),),
        distribution=RatioDistribution.of([np.array([0.1, 0.05]), np.array([0.6, 0.2, 0.01]), np.array([0.3])]),
    ).summary()
    assert found.to_dict("list") == {
        "component": ["x", "y"],
        "matrices": [2, 1],
        "least": [0.01, 0.3],
        "median": [pytest.approx((0.075 + 0.2) / 2), 0.3],
        "worst_ratio": [0.6, 0.3],
        "attained": [0.7, 0.8],
        "violations": [1, 0],
    }


CERTIFICATE = TokenCertificate(np.array([1.0, 1.0]), np.array([0.5, 2.0]), np.array([False, True]))


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        ({}, True),
        ({"composition": (HOLDS,), "contraction": (HOLDS,), "decisions": CERTIFICATE}, True),
        ({"violations": (Violation(None, BROKEN),)}, False),
        ({"composition": (HOLDS, BROKEN)}, False),
        ({"contraction": (HOLDS, BROKEN)}, False),
        ({"decisions": replace(CERTIFICATE, changed=np.array([True, False]))}, False),
    ],
)
def test_one_check_that_fails_fails_the_report(change: dict[str, Any], passed: bool, report: BoundsReport) -> None:
    found = replace(report, **change)
    assert found.passed is passed
    assert ("VIOLATED" in str(found)) == (not passed)
    assert ("VIOLATION" in found.headline()) == (not passed and "decisions" not in change)


def test_a_certified_token_is_one_that_moved_by_less_than_its_radius() -> None:
    found = TokenCertificate(np.array([1.0, 1.0, 0.0]), np.array([1.0, 0.999, 0.0]), np.array([True, True, True]))
    assert found.certified.tolist() == [False, True, False]
    assert found.violations == (1,)


def test_the_estimates_say_which_layers_contract(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = check_bounds(llama, ids[:1, :12], sparsity=0.1)
    assert found.method == "magnitude"
    told = found.headline()
    falls = [c.layer for c in found.contraction if c.theorem == "residual_growth_contraction"]
    layers = f" ({', '.join(map(str, falls))})" if falls else ""
    assert f"in {len(falls)} of 6 layers{layers}: there the relative error must fall" in told
    assert f"error {found.composition[-1].error:.4g}, composed estimate {found.composition[-1].bound:.4g}" in told
    assert f"γ = {found.gamma:.4g}" in told
    assert ("not below one, so lyapunov_contraction_bound does not apply" in told) == (found.gamma >= 1)
