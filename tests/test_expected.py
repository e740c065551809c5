"""What a divergence foretells: the lines in float64."""

from __future__ import annotations

import importlib

import numpy as np
import pandas as pd
import pytest

EXPECTED = importlib.import_module("experiments.4_hierarchy.prediction.expected")


def test_the_width_is_that_of_residuals_left_out_one_by_one() -> None:
    drawn = np.random.default_rng(0)
    kl = np.exp(drawn.normal(size=40))
    sets = pd.DataFrame({"kl": kl, "y": np.exp(0.3 + 0.9 * np.log(kl) + 0.1 * drawn.standard_normal(40))})
    fitting, held_out = sets[:19], sets[19:]
    line = EXPECTED.fitted(fitting, held_out, "y")
    A = np.stack([np.ones(19), np.log(fitting.kl)], 1)
    y = np.log(fitting.y.to_numpy())
    beta = np.linalg.solve(A.T @ A, A.T @ y)
    assert (line.intercept, line.slope) == pytest.approx(tuple(beta))
    hat = np.diag(A @ np.linalg.inv(A.T @ A) @ A.T)
    left = np.sort(np.abs(y - A @ beta) / (1 - hat))  # the residual of a point that the line does not see
    assert line.width == pytest.approx(left[17])  # ⌈20 · 0.9⌉ = 18th
    off = np.abs(np.log(held_out.y) - beta[0] - beta[1] * np.log(held_out.kl))
    assert line.covered == (off <= left[17]).mean()


def test_held_out_sets_are_half_of_every_model() -> None:
    sets = EXPECTED.measured()
    out = EXPECTED.drawn_out(sets)
    for _, own in sets.groupby("model"):
        assert abs(2 * out[own.index].sum() - len(own)) <= 1
