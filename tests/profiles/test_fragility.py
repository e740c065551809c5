"""The fragility index: its form, its fit, and what it says of too few models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import RHO, make_tiny, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, measure_contraction
from lyapunov_prune.profiles import FragilityPoint, compression_fragility, fit_fragility

# Tables 1 and 2 of the paper: largest ρ, width, and 1 − s*. (What 50 % Wanda does is lost in its text.)
PUBLISHED = [
    FragilityPoint("GPT-2 Small", 0.96, 768, 0.50),
    FragilityPoint("GPT-2 Medium", 2.05, 1024, 0.50),
    FragilityPoint("Qwen3.5-2B", 1.11, 2048, 0.40),
    FragilityPoint("LFM2-2.6B", 1.12, 2560, 0.20),
    FragilityPoint("Mistral-7B", 1.14, 4096, 0.05),
    FragilityPoint("Qwen3-8B", 1.33, 4096, 0.20),
]


def test_the_index_is_instability_times_width_penalty(llama: PreTrainedModel) -> None:
    profile = profile_of(llama)
    assert compression_fragility(profile, 768) == pytest.approx(max(RHO))
    assert compression_fragility(profile, 1536, alpha=2, beta=3) == pytest.approx(max(RHO) ** 2 / 8)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.2, 2), st.floats(-2, 2))
def test_a_law_of_this_form_is_recovered_and_predicts_the_unseen(seed: int, alpha: float, beta: float) -> None:
    rng = np.random.default_rng(seed)
    points = [
        FragilityPoint(f"{i}", rho, d, float(3 * rho**alpha * (768 / d) ** beta))
        for i, (rho, d) in enumerate(zip(rng.uniform(0.5, 3, 6), rng.permutation(6) * 700 + 500, strict=True))
    ]
    found = fit_fragility(points)
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta), abs=1e-6)
    assert found.spearman == pytest.approx(1)
    assert found.rank_errors.tolist() == [0] * 6


def test_on_the_papers_own_tables() -> None:
    """A different minimiser, one model left out; the paper states a mean rank error of 1.0 for its own form."""
    found = fit_fragility(PUBLISHED)

    def fitted(points: list[FragilityPoint]) -> np.ndarray:
        def residual(c: np.ndarray) -> list[float]:
            return [np.log(p.harm / p.instability ** c[1] / (768 / p.width) ** c[2]) - c[0] for p in points]

        return optimize.least_squares(residual, np.zeros(3), xtol=1e-12, ftol=1e-12).x

    assert (found.alpha, found.beta) == pytest.approx(tuple(fitted(PUBLISHED)[1:]), abs=1e-5)
    harms = np.array([p.harm for p in PUBLISHED])
    errors = []
    for i, p in enumerate(PUBLISHED):
        c = fitted(PUBLISHED[:i] + PUBLISHED[i + 1 :])
        guessed = harms.copy()
        guessed[i] = np.exp(c[0]) * p.instability ** c[1] * (768 / p.width) ** c[2]
        errors.append(abs(stats.rankdata(guessed)[i] - stats.rankdata(harms)[i]))
    assert found.rank_errors.tolist() == errors
    assert np.mean(errors) == pytest.approx(2 / 3)
    assert "mean rank error 0.67, largest 2 (Qwen3.5-2B). 6 points: an observation, no predictor" in str(found)


def test_planted_fault_a_model_that_the_fit_has_seen_is_ranked_better() -> None:
    """One model far off the law: it is ranked by a fit that has not seen it."""
    rng = np.random.default_rng(0)
    points = [FragilityPoint(f"{i}", r, 500 + 300 * i, float(r)) for i, r in enumerate(rng.uniform(0.5, 3, 6))]
    points[2] = FragilityPoint("odd", points[2].instability, points[2].width, 100.0)
    assert fit_fragility(points).rank_errors[2] >= 1


@pytest.mark.parametrize("n", [0, 2, 4])
def test_too_few_models_have_no_fit_and_are_told_so(n: int) -> None:
    found = fit_fragility(PUBLISHED[:n])
    assert np.isnan([found.alpha, found.beta, found.spearman, *found.rank_errors]).all()
    assert f"of {n} models: three numbers are fitted" in str(found)
    assert "no correlation to speak of" in str(found)


def test_models_that_all_bear_the_same_have_no_ranks() -> None:
    assert np.isnan(fit_fragility([FragilityPoint(p.model, p.instability, p.width, 2.0) for p in PUBLISHED]).spearman)


def test_bad_input_is_refused(ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="width of 1 or more"):
        compression_fragility(profile_of(make_tiny("llama")), 0)
    with pytest.raises(LyapunovPruneError, match="finite harm above 0"):
        FragilityPoint("wrecked", 1.0, 768, float("inf"))
    with pytest.raises(LyapunovPruneError, match="rounding floor"):
        compression_fragility(measure_contraction(make_tiny("llama").bfloat16(), ids, seeds=(0,)), 32)
