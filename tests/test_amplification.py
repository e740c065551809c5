"""Drift beside what the later layers do: the sign, the reference, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import LAYERS, make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import PreTrainedModel

from experiments.amplification import AmplificationDrift, amplification_drift, weighted_spearman
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.profiles.contraction import measure_contraction
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.sensitivity.sensitivity import Sensitivity, measure_sensitivity

EVALUATION = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(1))
CALIBRATION = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def found(llama: PreTrainedModel) -> Sensitivity:
    return measure_sensitivity(llama, EVALUATION, studies=["group", "removal"], sparsity=0.9)


@pytest.fixture(scope="module")
def profile(llama: PreTrainedModel) -> ContractionProfile:
    return measure_contraction(llama, CALIBRATION, seeds=(0,))


@pytest.fixture(scope="module")
def drift(found: Sensitivity, profile: ContractionProfile) -> AmplificationDrift:
    return amplification_drift(found, profile)


@pytest.mark.parametrize("pooling", ["energy", "token"])
def test_the_correlation_is_spearmans_over_groups(
    pooling: str, drift: AmplificationDrift, found: Sensitivity, profile: ContractionProfile
) -> None:
    V = profile.energies[pooling]
    rho = [V[k + 1] / V[k] for k in range(LAYERS)]
    after = [np.prod(rho[layer + 1 :]) for layer in range(LAYERS)]
    effects = [e for e in found.effects if e.study == "group"]
    for name, scores in (("A", after), ("rho", rho)):
        wanted = stats.spearmanr([scores[e.layer or 0] for e in effects], [e.drift for e in effects])
        frame = drift.to_frame()
        row = frame[(frame["drift with"] == name) & (frame.pooling == pooling)].iloc[0]
        assert (row.spearman, row.p_groups) == pytest.approx((wanted.statistic, wanted.pvalue))
        assert (row.groups, row.layers) == (7 * LAYERS, LAYERS)
        assert row.low <= row.spearman <= row.high


@pytest.mark.parametrize("sign", [1, -1])
def test_the_sign_is_plus_where_the_later_layers_amplify_what_drifts_more(sign: int, drift: AmplificationDrift) -> None:
    amplified = {pooling: 3.0 ** np.arange(LAYERS) for pooling in ("energy", "token")}
    moved = replace(drift, drift=np.array(drift.layers) * sign * 0.1, amplification=amplified)
    row = moved.to_frame().iloc[0]
    assert (row.spearman, row.low, row.high) == pytest.approx((sign, sign, sign))
    assert "+ where the later layers amplify, drift is larger" in str(moved)


def test_more_groups_of_the_same_layers_are_no_more_evidence(drift: AmplificationDrift) -> None:
    many = replace(drift, layers=drift.layers * 6, components=drift.components * 6, drift=np.tile(drift.drift, 6))
    once, often = drift.to_frame().iloc[0], many.to_frame().iloc[0]
    assert often.spearman == pytest.approx(once.spearman)
    assert (often.low, often.high, often.p) == pytest.approx((once.low, once.high, once.p))
    assert often.p_groups < once.p_groups / 2


def test_a_group_without_a_drift_is_left_out_and_said(drift: AmplificationDrift) -> None:
    values = drift.drift.copy()
    values[3] = np.nan
    broken = replace(drift, drift=values)
    assert broken.to_frame().groups.tolist() == [7 * LAYERS - 1] * 4
    assert "1 of NaN left out" in broken.headline()
    still = replace(drift, drift=np.zeros_like(values))
    assert still.to_frame()[["spearman", "low", "high", "p", "p_groups"]].isna().all(axis=None)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(4, 12))
def test_counted_values_correlate_as_repeated_ones(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(5, size=n).astype(float), rng.normal(size=n).round(1)
    counts = rng.integers(4, size=(6, n)) + (np.arange(n) < 2)
    for weights, value in zip(counts, weighted_spearman(x, y, counts), strict=True):
        a, b = np.repeat(x, weights), np.repeat(y, weights)
        wanted = stats.spearmanr(a, b).statistic if min(len(set(a)), len(set(b))) > 1 else np.nan
        np.testing.assert_allclose(value, wanted, atol=1e-12)


def test_bad_input_is_refused(found: Sensitivity, profile: ContractionProfile, llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match="study group"):
        amplification_drift(replace(found, effects=found.effects[-1:]), profile)
    with pytest.raises(LyapunovPruneError, match="profile is of"):
        amplification_drift(found, measure_contraction(make_tiny("gpt2"), CALIBRATION, seeds=(0,)))
    with pytest.raises(LyapunovPruneError, match="tokens of the drift"):
        amplification_drift(found, measure_contraction(llama, EVALUATION, seeds=(0,)))
    with pytest.raises(LyapunovPruneError, match="rounding floor"):
        amplification_drift(found, measure_contraction(llama, CALIBRATION, seeds=(0,), epsilon=1e-7))


def test_saves_loads_and_prints(drift: AmplificationDrift, tmp_path: Path) -> None:
    again = AmplificationDrift.load(drift.save(tmp_path / "drift.json"))
    assert str(again) == str(drift)
    with pytest.raises(LyapunovPruneError, match=f"layers: {LAYERS} at place 0"):
        replace(drift, layers=(LAYERS, *drift.layers[1:]))
