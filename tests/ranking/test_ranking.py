"""Ranking: the criteria's formulas, ties, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import LAYERS, make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from lyapunov_prune import LyapunovPruneError, PruningPlan, block_influence, measure_contraction, rank_layers
from lyapunov_prune.profiles import InfluenceProfile
from lyapunov_prune.profiles.contraction_profile import ContractionProfile

_MODEL = make_tiny("llama")
_IDS = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
_PROFILE = measure_contraction(_MODEL, _IDS, seeds=(0,))
_INFLUENCE = block_influence(_MODEL, _IDS)
_POSITIVE = arrays(np.float64, LAYERS, elements=st.floats(0.01, 100))


def with_rho(rho: np.ndarray) -> ContractionProfile:
    energy = np.concatenate([[1.0], np.cumprod(rho)])
    return replace(_PROFILE, energies={"energy": energy, "token": energy})


def with_influence(influence: np.ndarray) -> InfluenceProfile:
    return replace(_INFLUENCE, influence=influence)


@settings(max_examples=50)
@given(_POSITIVE, _POSITIVE, st.floats(0, 1))
def test_scores_are_the_definitions(rho: np.ndarray, influence: np.ndarray, alpha: float) -> None:
    profile, bi = with_rho(rho), with_influence(influence)

    def robust(x: np.ndarray) -> np.ndarray:
        spread = stats.iqr(x)
        return (x - np.median(x)) / (spread if spread > 1e-12 * np.ptp(x) else np.ptp(x) or 1)

    distance = np.abs(profile.rho - 1)
    expected = alpha * robust(distance) + (1 - alpha) * robust(influence)
    np.testing.assert_array_equal(rank_layers(profile, criterion="rho").scores, distance)
    np.testing.assert_array_equal(rank_layers(None, bi, criterion="bi").scores, influence)
    np.testing.assert_allclose(rank_layers(profile, bi, criterion="blend", alpha=alpha).scores, expected)


@settings(max_examples=50)
@given(_POSITIVE, st.integers(1, LAYERS - 1))
def test_a_plan_removes_the_smallest_scores(influence: np.ndarray, count: int) -> None:
    ranking = rank_layers(None, with_influence(influence), criterion="bi")
    plan = ranking.plan(count)
    assert sorted(ranking.order) == list(range(LAYERS))
    assert len(plan.remove) == count
    assert max(influence[list(plan.remove)]) <= min(influence[list(plan.kept)])


def test_the_ends_of_the_blend_are_the_pure_criteria() -> None:
    blend = partial(rank_layers, _PROFILE, _INFLUENCE, criterion="blend")
    assert blend(alpha=1).order == rank_layers(_PROFILE, criterion="rho").order
    assert blend(alpha=0).order == rank_layers(None, _INFLUENCE, criterion="bi").order


def test_one_outlier_does_not_set_the_scale_of_a_blend() -> None:
    distance = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 9.0])[:LAYERS]
    bi = np.array([0.5, 0.4, 0.3, 0.2, 0.1, 0.6])[:LAYERS]
    first = rank_layers(with_rho(1 + distance), with_influence(bi), criterion="blend", alpha=0.6)
    distance[-1] = 9e6
    assert rank_layers(with_rho(1 + distance), with_influence(bi), criterion="blend", alpha=0.6).order == first.order


def test_where_most_scores_are_equal_their_range_is_the_scale() -> None:
    bi = np.ones(LAYERS)
    bi[2] = 3.0
    scores = rank_layers(_PROFILE, with_influence(bi), criterion="blend", alpha=0).scores
    np.testing.assert_array_equal(scores, np.arange(LAYERS) == 2)


def test_equal_scores_keep_the_order_of_the_model() -> None:
    assert rank_layers(None, with_influence(np.ones(LAYERS)), criterion="bi").order == tuple(range(LAYERS))


def test_rho_follows_the_pooling() -> None:
    token = _PROFILE.pooled("token")
    np.testing.assert_array_equal(rank_layers(token, criterion="rho").scores, np.abs(token.rho - 1))


def test_positional_criteria() -> None:
    assert rank_layers(_PROFILE, criterion="from-end").plan(2).remove == (LAYERS - 2, LAYERS - 1)
    orders = {rank_layers(_PROFILE, criterion="random", seed=s).order for s in range(5)}
    assert len(orders) > 1
    assert all(sorted(order) == list(range(LAYERS)) for order in orders)
    assert (
        rank_layers(_PROFILE, criterion="random", seed=3).order
        == rank_layers(_PROFILE, criterion="random", seed=3).order
    )


def test_bad_requests_are_refused() -> None:
    other = block_influence(make_tiny("gpt2"), _IDS)
    for message, call in {
        "unknown criterion": lambda: rank_layers(_PROFILE, criterion="good"),
        r"alpha.*1\.5": lambda: rank_layers(_PROFILE, _INFLUENCE, criterion="blend", alpha=1.5),
        "needs a contraction": lambda: rank_layers(None, _INFLUENCE, criterion="rho"),
        "needs Block Influence": lambda: rank_layers(_PROFILE, criterion="blend"),
        "bi needs Block Influence": lambda: rank_layers(),
        "profile is of": lambda: rank_layers(_PROFILE, other),
        "not finite": lambda: with_influence(np.array([1.0, np.nan, 1, 1, 1, 1])),
        "remove is 0": lambda: rank_layers(_PROFILE, criterion="rho").plan(0),
        "cannot remove 6 of 6": lambda: rank_layers(_PROFILE, criterion="rho").plan(LAYERS),
    }.items():
        with pytest.raises(LyapunovPruneError, match=message):
            call()


# Whole periods.


@settings(max_examples=50)
@given(_POSITIVE, st.integers(2, 3), st.integers(1, 2))
def test_periods_leave_whole_and_the_best_of_them(influence: np.ndarray, period: int, count: int) -> None:
    whole = LAYERS // period
    count = min(count, whole - 1)
    plan = rank_layers(None, with_influence(influence), criterion="bi").plan(count * period, period)
    sums = [influence[p * period : (p + 1) * period].sum() for p in range(whole)]
    removed = {layer // period for layer in plan.remove}
    assert (len(plan.remove), len(removed)) == (count * period, count)
    assert max(sums[p] for p in removed) <= min(sums[p] for p in range(whole) if p not in removed)


def test_a_rest_that_is_no_whole_period_stays() -> None:
    falling = with_influence(np.arange(LAYERS, 0, -1.0))  # the rest at the end has the smallest scores
    assert rank_layers(None, falling, criterion="bi").plan(2).remove == (4, 5)
    ranking = rank_layers(None, falling, criterion="bi")
    five = replace(ranking.model, num_layers=5)
    ranking = replace(ranking, scores=np.array([3.0, 3, 2, 2, 1]), model=five, picked=None)
    assert ranking.plan(2, period=2).remove == (2, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("protected", [(), (0,)])
def test_a_layer_that_may_go_has_a_finite_score(bad: float, protected: tuple[int, ...]) -> None:
    whole = rank_layers(influence=_INFLUENCE, criterion="bi", protect=protected)
    scores = np.roll(whole.scores, 1) if np.isnan(bad) else whole.scores.copy()  # as many without, elsewhere
    scores[1] = bad
    with pytest.raises(LyapunovPruneError, match=r"scores: (-?inf at place 1|those of the protected)"):
        replace(whole, scores=scores)


@pytest.mark.parametrize("remove", [1, 4, 6, 0])
def test_a_number_that_is_no_whole_periods_is_refused(remove: int) -> None:
    with pytest.raises(LyapunovPruneError, match="give" if not remove else "repeat every 3; give remove=3"):
        rank_layers(_PROFILE, criterion="rho").plan(remove, period=3)


@pytest.mark.parametrize("period", [0, -1, -2])
def test_a_period_below_one_is_none(period: int) -> None:
    ranking = rank_layers(None, with_influence(np.arange(LAYERS) / 10.0), criterion="bi")
    with pytest.raises(LyapunovPruneError, match=f"period is {period}"):
        ranking.plan(2, period)


@pytest.mark.parametrize("period", [LAYERS // 2 + 1, LAYERS, LAYERS + 1])
def test_where_no_whole_period_can_go_it_says_so(period: int) -> None:
    ranking = rank_layers(None, with_influence(np.arange(LAYERS) / 10.0), criterion="bi")
    with pytest.raises(LyapunovPruneError, match="no whole periods"):
        ranking.plan(2, period)


# Ratios that are rounding.


def with_floor(below: tuple[int, ...]) -> ContractionProfile:
    """A profile whose ratios of these layers lie below the floor; a floor belongs to a boundary, so neighbours do."""
    floor = np.zeros(LAYERS + 1)
    floor[[layer + 1 for layer in below]] = 1.0
    return replace(_PROFILE, floor=floor)


def test_a_profile_of_noise_ranks_nothing() -> None:
    model = make_tiny("llama").bfloat16()
    profile, influence = measure_contraction(model, _IDS, seeds=(0,)), block_influence(model, _IDS)
    assert profile.below_floor == tuple(range(LAYERS))
    for criterion in ("rho", "blend"):
        said = r"every rho .* floor of bfloat16; .*float32.*epsilon.*bi"
        with pytest.raises(LyapunovPruneError, match=said) as error:
            rank_layers(profile, influence, criterion=criterion)
        assert "\n" not in str(error.value)
    for criterion in ("bi", "from-end", "random"):  # which go by something else
        assert rank_layers(profile, influence, criterion=criterion).below_floor == ()
    derivative = measure_contraction(model, _IDS, seeds=(0,), method="jvp")
    assert rank_layers(derivative, criterion="rho").below_floor == derivative.below_floor


@pytest.mark.parametrize("criterion", ["rho", "blend"])
def test_layers_below_the_floor_are_told_wherever_they_decide(criterion: str, tmp_path: Path) -> None:
    ranking = rank_layers(with_floor((2,)), _INFLUENCE, criterion=criterion)
    assert ranking.below_floor == (2, 3)
    assert np.array_equal(ranking.scores, rank_layers(_PROFILE, _INFLUENCE, criterion=criterion).scores)
    plan = PruningPlan.load(ranking.plan(2).save(tmp_path / "plan.json"))
    for said in (ranking, plan):
        assert "rho lies below the rounding floor at layer 2, 3" in said.headline()
        frame = said.to_frame().set_index("layer")
        assert set(frame.index[frame.below_floor]) == {2, 3}
    above = rank_layers(_PROFILE, _INFLUENCE, criterion=criterion)
    assert "floor" not in f"{above}{above.plan(2)}"


def test_a_plan_of_before_the_floor_was_told_is_read(tmp_path: Path) -> None:
    path = rank_layers(_PROFILE, criterion="rho").plan(2).save(tmp_path / "plan.json")
    data = json.loads(path.read_text())
    del data["below_floor"]
    path.write_text(json.dumps(data))
    assert PruningPlan.load(path).below_floor == ()


@pytest.mark.parametrize("criterion", ["rho", "blend"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_rho_that_is_no_number_is_named(criterion: str, bad: float) -> None:
    energy = np.ones(LAYERS + 1)
    energy[3:5] = 0 if np.isnan(bad) else (0, 1)
    broken = replace(_PROFILE, energies={"energy": energy, "token": energy})
    with pytest.raises(LyapunovPruneError, match=r"rho .*number 3"):
        rank_layers(broken, _INFLUENCE, criterion=criterion)
