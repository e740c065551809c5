"""How errors lie below their bounds: quantiles and counts by hand."""

from __future__ import annotations

import numpy as np

from lyapunov_prune.bounds.distribution import RatioDistribution


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
