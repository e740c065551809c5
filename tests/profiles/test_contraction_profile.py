"""What a `ContractionProfile` says of its numbers: thresholds, notes, and shapes that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, measure_contraction
from lyapunov_prune.profiles.contraction_profile import ContractionProfile, dtype_note
from lyapunov_prune.pruning.plan import PruningPlan


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_decision_says_in_which_half_precision_it_was_made(dtype: str, llama: PreTrainedModel) -> None:
    on = dataclasses.replace(measure_contraction(llama, torch.ones(1, 4, dtype=torch.int64)).measured_on, dtype=dtype)
    told = f"; measured in {dtype}, and float32 may choose others (--dtype float32)" if "16" in dtype else ""
    assert dtype_note([on, on]) == told
    plan = PruningPlan.given(llama, [1])
    ranked = dataclasses.replace(plan, scores=np.arange(LAYERS, dtype=float), measured_on=(on,))
    assert ranked.headline() == plan.headline() + told


@pytest.mark.parametrize("boundary", range(LAYERS + 1))
def test_a_ratio_rests_on_both_its_energies(boundary: int, llama: PreTrainedModel) -> None:
    """The planted fault: one energy above the floor is enough."""
    profile = measure_contraction(llama, torch.ones(1, 4, dtype=torch.int64), seeds=(0,))
    floor = np.zeros(LAYERS + 1)
    floor[boundary] = 1.0
    below = dataclasses.replace(profile, floor=floor).below_floor
    assert below == tuple(layer for layer in (boundary - 1, boundary) if 0 <= layer < LAYERS)


def by_hand(profile: ContractionProfile, energy: list[float], token: list[float], **others: Any) -> ContractionProfile:
    energies = {"energy": np.array(energy), "token": np.array(token)}
    return dataclasses.replace(profile, energies=energies, **others)


@pytest.fixture(scope="module")
def measured() -> ContractionProfile:
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(2))
    return measure_contraction(make_tiny("llama"), ids, seeds=(0, 1))


def test_what_follows_from_the_energies(measured: ContractionProfile) -> None:
    found = by_hand(measured, [8.0, 4.0, 4.0, 8.0, 2.0, 4.0, 1.0], [8.0, 4.0, 9.0, 8.0, 1.0, 4.0, 1.0])
    assert found.rho.tolist() == [0.5, 1, 2, 0.25, 2, 0.25]
    assert found.contracting == (2, 5)  # of the transitions between layers: the last layer is none, 1 is no contraction
    assert found.downstream_amplification.tolist() == [0.25, 0.25, 0.125, 0.5, 0.25, 1]
    # ρ by tokens: 1/2, 9/4, 8/9, 1/8, 4, 1/4. Twofold is not more than twofold.
    assert found.pooling_disagrees == (1, 2)
    token = found.pooled("token")
    assert token.rho[1] == 9 / 4
    frame = token.to_frame()
    np.testing.assert_allclose(frame["rho_energy"], found.rho)
    np.testing.assert_allclose(frame["rho"], token.rho)
    np.testing.assert_allclose(frame["low"], token.rho_interval[:, 0])
    np.testing.assert_allclose(frame["high"], token.rho_interval[:, 1])
    np.testing.assert_allclose(frame["sink_share"], found.sink_state_share[1:])
    assert frame["layer"].tolist() == list(range(LAYERS))


def test_the_headline_gives_the_spread_of_growth_in_parts_of_its_mean(measured: ContractionProfile) -> None:
    found = dataclasses.replace(measured, norm_growth=np.array([1.0, 3.0]))
    assert "K = 2 (CV 0.5)" in found.headline()


def test_thresholds_are_where_they_are_said_to_be(measured: ContractionProfile) -> None:
    energies = [100.0, 101.0, 99.0, 1000.0, 1000.0, 1e9, 1e9]
    found = by_hand(measured, energies, energies, floor=np.ones(LAYERS + 1))
    # A hundred times the floor is not above it.
    assert found.above_floor.tolist() == [False, False, False, True, True, True]
    assert found.below_floor == (0, 1, 2)
    assert found.above(10.0).all()
    found.require_above_floor()
    with pytest.raises(LyapunovPruneError, match="every rho"):
        by_hand(measured, energies, energies, floor=np.full(LAYERS + 1, 1e8)).require_above_floor()
    linearity = np.array([1.0, 1.0999, 1.1001, 1 / 1.0999, 1 / 1.1001, np.nan])
    assert dataclasses.replace(measured, linearity=linearity).not_linear == (2, 4)
    assert dataclasses.replace(measured, linearity=None).not_linear == ()
    one = dataclasses.replace(measured.windows, state=np.ones((LAYERS + 1, 1)))  # type: ignore[type-var]
    assert measured.drawn() is not None
    assert dataclasses.replace(measured, windows=None).drawn() is None
    assert one.state.shape[-1] == 1


@pytest.mark.parametrize("pooling", ["energy", "token"])
@pytest.mark.parametrize("part", ["energies", "intervals"])
def test_numbers_that_are_none_are_refused_under_either_pooling(
    pooling: str, part: str, measured: ContractionProfile
) -> None:
    numbers = dict(getattr(measured, part))
    numbers[pooling] = numbers[pooling][:-1]
    with pytest.raises(LyapunovPruneError, match=f"{part} of {pooling}"):
        dataclasses.replace(measured, **{part: numbers})
    del numbers[pooling]
    with pytest.raises(LyapunovPruneError, match="of both poolings"):
        dataclasses.replace(measured, **{part: numbers})


@pytest.mark.parametrize("name", ["floor", "error_growth", "state_growth", "sink_state_share", "sink_error_share"])
def test_arrays_of_another_length_are_refused(name: str, measured: ContractionProfile) -> None:
    with pytest.raises(LyapunovPruneError, match=f"ContractionProfile, {name}"):
        dataclasses.replace(measured, **{name: getattr(measured, name)[:-1]})
    if name.startswith("sink"):
        dataclasses.replace(measured, **{name: np.full(LAYERS + 1, 1 + 5e-7)})  # a share, summed in another order
        with pytest.raises(LyapunovPruneError, match=f"ContractionProfile, {name}"):
            dataclasses.replace(measured, **{name: np.full(LAYERS + 1, 1 + 5e-6)})


def test_windows_and_linearity_of_another_shape_are_refused(measured: ContractionProfile) -> None:
    assert measured.windows is not None
    for name in ("state", "error", "relative"):
        windows = dataclasses.replace(measured.windows, **{name: getattr(measured.windows, name)[1:]})
        with pytest.raises(LyapunovPruneError, match=f"windows, {name}: "):
            dataclasses.replace(measured, windows=windows)
    with pytest.raises(LyapunovPruneError, match="linearity"):
        dataclasses.replace(measured, linearity=np.ones(LAYERS - 1))
