"""What a divergence foretells: the lines in float64, the range that they know, and the shipped table."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lyapunov_prune.predictions.expectation import TABLE, Expectation, Line, expectation, from_json

EXPECTED = importlib.import_module("experiments.4_hierarchy.prediction.expected")


def made(covered: float = 0.9, unseen: float = 0.85) -> Expectation:
    perplexity, part = Line(0.0, 1.0, math.log(2), covered), Line(math.log(4), -1.0, 0.0, 0.9)
    return Expectation(("a", "b"), 10, 8, 0.9, 0.1, 2.0, 32, perplexity, part, (0.9, unseen))


def test_the_lines_are_told_of_in_their_own_units() -> None:
    # ln ratio = KL, twice and half of it; 1 + steps = 4 / KL.
    said = made().told(0.5)
    assert f"{math.exp(0.5):.3g} times the dense perplexity ({math.exp(0.25):.3g} to {math.exp(1):.3g})" in said
    assert "the dense model's for 7 tokens (7 to 7)" in said
    assert "90% intervals from 10 sets of layers of 2 models (a, b); of 8 held-out sets 90% and 90%" in said
    assert said.endswith(" 90% and 85%.")
    assert "MLPs" not in said
    assert "MLPs" in made().told(0.5, "MLPs")


def test_a_table_that_covers_much_less_than_it_claims_says_so() -> None:
    assert "far fewer" not in made(0.81).told(0.5)
    assert "90% and 85%, far fewer" in made(0.5).told(0.5)
    assert "90% and 50%, far fewer" in made(0.9, 0.5).told(0.5)


def test_of_models_that_a_fit_had_not_seen_the_worst_counts() -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    shares = [{"perplexity": 0.9, "first_difference": 0.6}, {"perplexity": 0.7, "first_difference": 0.8}]
    assert from_json({**table, "unseen_model": dict(zip("ab", shares, strict=True))}).unseen == (0.7, 0.6)


@pytest.mark.parametrize("kl", [0.05, 2.5, math.inf, math.nan])
def test_outside_of_what_was_fitted_nothing_is_foretold(kl: float) -> None:
    assert "not predicted: the fit covers 0.1 to 2" in made().told(kl)


def test_texts_part_neither_before_the_first_step_nor_after_the_last() -> None:
    far = replace(made(), first_difference=Line(math.log(4), -1.0, 5.0, 0.9))
    assert "(0 to 32)" in far.told(0.5)


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


def test_the_shipped_table_is_what_the_measurements_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXPECTED, "TARGET", tmp_path / "expected.json")
    EXPECTED.main()
    fresh, shipped = (json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "expected.json", TABLE))
    assert fresh == shipped, "run experiments/4_hierarchy/prediction/expected.py"
    assert expectation().models == tuple(shipped["models"])
    assert shipped["fitted"] + shipped["held_out"] == len(EXPECTED.measured())


def test_held_out_sets_are_half_of_every_model() -> None:
    sets = EXPECTED.measured()
    out = EXPECTED.drawn_out(sets)
    for _, own in sets.groupby("model"):
        assert abs(2 * out[own.index].sum() - len(own)) <= 1
