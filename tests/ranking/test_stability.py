"""How often a layer is picked: against windows and seeds drawn one by one, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import LAYERS, make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import lyapunov_prune as lp
from lyapunov_prune.profiles import sublayer_influence
from lyapunov_prune.profiles.propagation import RESAMPLES
from lyapunov_prune.ranking import angular_distance, rank_sublayers
from lyapunov_prune.ranking.stability import picked, tied

_SCORES = arrays(np.float64, (7, 5), elements=st.floats(-3, 3, width=16))


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.randint(97, (4, 12), generator=torch.Generator().manual_seed(3))


@settings(max_examples=50)
@given(_SCORES, st.sets(st.integers(0, 4), max_size=3))
def test_picked_counts_who_is_among_the_first(scores: np.ndarray, without: set[int]) -> None:
    scores = scores.copy()
    scores[:, list(without)] = np.nan
    often = picked(scores)
    for count in range(1, 6):
        wanted = np.zeros(5)
        for row in scores:
            with_score = [layer for layer in range(5) if layer not in without]
            for layer in sorted(with_score, key=lambda i, row=row: (row[i], i))[:count]:
                wanted[layer] += 1 / 7
        np.testing.assert_allclose(often[count - 1], wanted, atol=1e-12)


@pytest.mark.parametrize("pooling", ["energy", "token"])
@pytest.mark.parametrize("criterion", ["rho", "bi", "blend"])
def test_picks_are_those_of_windows_and_seeds_drawn_one_by_one(
    windows: torch.Tensor, criterion: str, pooling: str
) -> None:
    model = make_tiny("llama")
    profile = lp.measure_contraction(model, windows, seeds=(0, 1, 2), pooling=pooling)
    influence = lp.block_influence(model, windows)
    assert profile.windows is not None
    assert influence.windows is not None
    found = lp.rank_layers(profile, influence, criterion=criterion, protect=[1])
    rng = np.random.default_rng(0)
    drawn_windows = [np.repeat(range(4), row) for row in rng.multinomial(4, [1 / 4] * 4, RESAMPLES)]
    drawn_seeds = [np.repeat(range(3), row) for row in rng.multinomial(3, [1 / 3] * 3, RESAMPLES)]
    rankings = []
    for w, s in zip(drawn_windows[:100], drawn_seeds[:100], strict=True):
        state, error, relative = (
            profile.windows.state[:, w],
            *(getattr(profile.windows, name)[:, s][:, :, w] for name in ("error", "relative")),
        )
        V = relative.mean((1, 2)) if pooling == "token" else error.mean(1).sum(1) / state.sum(1)
        anew = replace(profile, energies=dict.fromkeys(("energy", "token"), V), windows=None)
        bi = replace(influence, influence=influence.windows[:, w].mean(1), windows=None)
        rankings.append(lp.rank_layers(anew, bi, criterion=criterion, protect=[1]))
    known = lp.rank_layers(profile, influence, criterion=criterion, protect=[1])
    assert known.picked is not None
    for count in (1, 3):
        share = np.mean([np.isin(range(LAYERS), r.plan(count).remove) for r in rankings], axis=0)
        # a hundred of the two thousand draws
        np.testing.assert_allclose(known.picked[count - 1], share, atol=0.17)
        np.testing.assert_allclose(known.picked[count - 1].sum(), count)
        assert known.picked[count - 1][1] == 0
        np.testing.assert_array_equal(found.plan(count).picked, known.picked[count - 1])


def test_one_window_tells_nothing_of_others(windows: torch.Tensor) -> None:
    model = make_tiny("llama")
    profile, influence = lp.measure_contraction(model, windows[:1]), lp.block_influence(model, windows[:1])
    for criterion in ("rho", "bi", "blend"):
        assert lp.rank_layers(profile, influence, criterion=criterion).picked is None
    assert angular_distance(model, windows[:1]).picked is None
    assert "How often" not in lp.rank_layers(profile, influence).plan(2).headline()


def test_sublayers_and_files_of_before(windows: torch.Tensor) -> None:
    model = make_tiny("llama")
    measured = sublayer_influence(model, windows)
    ranking = rank_sublayers(measured, "mlp")
    assert ranking.picked is not None
    np.testing.assert_allclose(ranking.picked[1].sum(), 2)
    assert rank_sublayers(replace(measured, windows=None), "mlp").picked is None


@pytest.mark.parametrize("layer", range(LAYERS))
def test_picks_of_runs_are_those_of_distances_drawn_anew(windows: torch.Tensor, layer: int) -> None:
    model = make_tiny("llama")
    found = angular_distance(model, windows, batch_size=3, protect=[layer])
    each = np.array([angular_distance(model, window[None]).distance for window in windows])
    np.testing.assert_allclose(found.distance, each.mean(0), atol=1e-12)
    draws = np.random.default_rng(0).multinomial(4, [1 / 4] * 4, RESAMPLES)
    distances = np.tensordot(draws / 4, each, 1)
    assert found.picked is not None
    for remove in (1, 2, 3):
        wanted = np.zeros(LAYERS)
        runs = [first for first in range(LAYERS + 1 - remove) if not first <= layer < first + remove]
        for distance in distances:
            first = min(runs, key=lambda f, distance=distance: distance[f, f + remove])
            wanted[first : first + remove] += 1 / RESAMPLES
        np.testing.assert_allclose(found.picked[remove - 1], wanted, atol=2 / RESAMPLES)
        np.testing.assert_array_equal(found.plan(remove).picked, found.picked[remove - 1])


def test_a_cut_through_a_tie_is_told(windows: torch.Tensor) -> None:
    influence = lp.block_influence(make_tiny("llama"), windows)
    equal = replace(influence, influence=np.array([0.5, 0.2, 0.1, 0.2 * (1 + 1e-12), 0.9, 0.9]))
    ranking = lp.rank_layers(None, equal)
    assert ranking.plan(2).tied == (1, 3)
    assert "Layers 1 and 3 have one score: that 1 goes is their order in the model" in ranking.plan(2).headline()
    assert ranking.plan(1).tied == ranking.plan(3).tied == ()
    assert ranking.plan(2, period=2).tied == ()
    assert tied(np.array([1.0, 1.0]), (0, 1), 2) == ()  # all go


def test_a_plan_names_who_stays_and_is_picked_as_well(windows: torch.Tensor) -> None:
    plan = lp.rank_layers(None, lp.block_influence(make_tiny("llama"), windows)).plan(2)
    often = np.zeros(LAYERS)
    often[list(plan.remove)] = 1.0, 0.6
    other = plan.kept[0]
    often[other] = 0.4
    told = replace(plan, picked=often).headline()
    assert (
        f"resampled: {plan.remove[0]} (100%), {plan.remove[1]} (60%); left, and picked as well: {other} (40%)"
    ) in told
    with pytest.raises(lp.LyapunovPruneError, match="plan, picked"):
        replace(plan, picked=often * 3)
