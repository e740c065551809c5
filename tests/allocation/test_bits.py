"""Bit widths: which layers are wide, and which budgets whole layers can meet."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, make_tiny, profile_of
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.allocation import Allocation
from lyapunov_prune.allocation.schedules.bits import Bits
from lyapunov_prune.models.structure import identify
from lyapunov_prune.profiles import ContractionProfile


def allocate_bits(model: PreTrainedModel, budget: float, given: Any, **options: Any) -> Allocation:
    return Bits(**options).allocate(model, budget, given)


@pytest.fixture(scope="module")
def profile(llama: PreTrainedModel) -> ContractionProfile:
    return profile_of(llama)


@pytest.mark.parametrize("count", range(LAYERS + 1))
@pytest.mark.parametrize(("low", "high"), [(4, 8), (2, 3)])
def test_the_layers_of_largest_amplification_are_wide(
    llama: PreTrainedModel, profile: ContractionProfile, count: int, low: int, high: int
) -> None:
    budget = low + (high - low) * count / LAYERS
    found = allocate_bits(llama, budget, profile, low=low, high=high)
    # A = 0.5625, 1.125, 0.75, 3, 3, 1: of the two that are equal the earlier comes first.
    wide = [3, 4, 1, 5, 2, 0][:count]
    np.testing.assert_array_equal(found.by_layer(), [high if layer in wide else low for layer in range(LAYERS)])
    assert found.unit == "bits"
    assert abs(found.mean - budget) <= 1e-12


@pytest.mark.parametrize(
    ("budget", "nearest"), [(5.0, [4 + 4 / 6, 4 + 8 / 6]), (3.9, [4.0]), (8.5, [8.0]), (4.67, [4 + 4 / 6, 4 + 8 / 6])]
)
def test_a_budget_between_layers_is_refused_with_those_that_can_be_met(
    llama: PreTrainedModel, profile: ContractionProfile, budget: float, nearest: list[float]
) -> None:
    with pytest.raises(LyapunovPruneError, match="whole layers of 4 and 8") as error:
        allocate_bits(llama, budget, profile)
    named = [float(x) for x in re.findall(r"[\d.]+", str(error.value).partition("give ")[2])]
    np.testing.assert_allclose(named, nearest, rtol=1e-12)
    for value in named:
        assert abs(allocate_bits(llama, value, profile).mean - value) <= 1e-12


def test_layers_count_by_their_size() -> None:
    model = make_tiny("llama")
    attention = model.get_submodule("model.layers.3.self_attn")
    attention.k_proj = torch.nn.Linear(32, 160, bias=False)
    # A model of this shape cannot run: its profile is another's.
    of_other = profile_of(make_tiny("llama"))
    own = dataclasses.replace(of_other, measured_on=dataclasses.replace(of_other.measured_on, model=identify(model)))
    sizes = np.full(LAYERS, 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    sizes[3] += (160 - 16) * 32
    budget = 4 + 4 * sizes[[3, 4]].sum() / sizes.sum()
    found = allocate_bits(model, float(budget), own)
    np.testing.assert_array_equal(found.by_layer(), [4, 4, 4, 8, 8, 4])
    with pytest.raises(LyapunovPruneError, match="whole layers"):
        allocate_bits(model, 4 + 8 / 6, own)


@pytest.mark.parametrize(("low", "high"), [(8, 4), (4, 4), (0, 4), (4, 17), (2.5, 4)])
def test_widths_without_sense_are_refused(
    llama: PreTrainedModel, profile: ContractionProfile, low: int, high: int
) -> None:
    with pytest.raises(LyapunovPruneError, match="1 to 16"):
        allocate_bits(llama, 4.0, profile, low=low, high=high)


def test_factors_and_profiles_that_do_not_serve_are_refused(
    llama: PreTrainedModel, profile: ContractionProfile
) -> None:
    broken = dataclasses.replace(profile, energies=dict.fromkeys(("energy", "token"), np.zeros(LAYERS + 1)))
    with pytest.raises(LyapunovPruneError, match=r"rho of layer 0.*nan"):
        allocate_bits(llama, 4.0, broken)
    with pytest.raises(LyapunovPruneError, match="contraction profile"):
        allocate_bits(make_tiny("llama", seed=1), 4.0, profile)
