"""Every schedule on two families: one kind of object, the budget exactly, or a refusal that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_tiny, profile_of
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from lyapunov_prune import LyapunovPruneError, allocate, measure_contraction
from lyapunov_prune.allocation import Allocation
from lyapunov_prune.allocation.schedule import SPARSEST
from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections

SPARSITIES = [name for name, known in SCHEDULES.items() if known.unit == "sparsity"]


class Depth:
    """A score that looks at nothing but the last layer's sparsity."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.measured_on = read(wrap(model), ids).measured_on()

    def __call__(self, allocation: Allocation) -> float:
        return abs(allocation.by_layer()[-1] - 0.8)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_tiny(request.param)


@pytest.fixture(scope="module")
def given(model: PreTrainedModel) -> dict[str, Any]:
    ids = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(2))
    return {"batch": ids, "profile": measure_contraction(model, ids, seeds=[0]), "score": Depth(model, ids)}


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("schedule", SPARSITIES)
def test_the_mean_is_the_budget_and_the_amounts_are_sparsities(
    model: PreTrainedModel, given: dict[str, Any], schedule: str, budget: float, tmp_path: Path
) -> None:
    found = allocate(model, schedule, budget, **given)
    sizes = np.array([p.weight(model).numel() for p in find_projections(wrap(model))])
    assert abs(float((found.amount * sizes).sum() / sizes.sum()) - budget) <= 1e-12
    assert abs(found.mean - budget) <= 1e-12
    assert (found.amount >= 0).all()
    assert (found.amount <= SPARSEST).all()
    assert (np.ptp(found.amount) == 0) == (schedule == "uniform")
    assert (found.schedule, found.unit, found.budget) == (schedule, "sparsity", budget)
    assert found.names == tuple(p.name for p in find_projections(wrap(model)))
    assert set(found.parameters) - {"beta"} == set(SCHEDULES[schedule].options()) - {"beta"}
    assert len(found.measured_on) == (SCHEDULES[schedule].needs is not None)
    assert str(Allocation.load(found.save(tmp_path / "allocation.json"))) == str(found)


def test_bits_are_an_allocation_as_well(model: PreTrainedModel, given: dict[str, Any], tmp_path: Path) -> None:
    found = allocate(model, "bits", 6.0, **given)
    assert abs(found.mean - 6) <= 1e-12
    assert set(found.amount) == {4.0, 8.0}
    assert str(Allocation.load(found.save(tmp_path / "allocation.json"))) == str(found)


@pytest.mark.parametrize("schedule", SPARSITIES)
def test_nothing_is_removed_at_0_and_what_cannot_be_met_is_refused(
    model: PreTrainedModel, given: dict[str, Any], schedule: str
) -> None:
    assert not allocate(model, schedule, 0.0, **given).amount.any()
    for budget in (-0.1, 1.0, float("nan")):
        with pytest.raises(LyapunovPruneError, match=r"budget|give 0 or more and less than 1"):
            allocate(model, schedule, budget, **given)
    with pytest.raises(LyapunovPruneError, match=r"mean 0\.995"):
        allocate(model, schedule, 0.995, **given)


def test_experts_take_part_where_their_weights_are_enough() -> None:
    config = MixtralConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for schedule in SPARSITIES:
        if schedule not in ("owl", "atp-search"):
            assert abs(allocate(model, schedule, 0.5, profile=profile_of(model, [2, 0.5, 3])).mean - 0.5) <= 1e-12


def test_what_is_missing_or_unknown_is_said(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="unknown schedule 'best'"):
        allocate(llama, "best", 0.5)
    with pytest.raises(LyapunovPruneError, match=r"owl.*batch"):
        allocate(llama, "owl", 0.5, profile=profile_of(llama))
    for schedule in ("lyapunov", "lyapunov-budget", "bits"):
        with pytest.raises(LyapunovPruneError, match=f"{schedule} needs a contraction profile"):
            allocate(llama, schedule, 0.5, batch=ids)
    with pytest.raises(LyapunovPruneError, match=r"atp-search.*score"):
        allocate(llama, "atp-search", 0.5, batch=ids)
    for schedule, word in (("atp", {"beta": "steep"}), ("owl", {"width": None}), ("bits", {"low": "4"})):
        with pytest.raises(LyapunovPruneError, match=f"of {schedule} is .*give"):
            allocate(llama, schedule, 0.5, batch=ids, profile=profile_of(llama), **word)
    with pytest.raises(LyapunovPruneError, match="atp has no tau"):
        allocate(llama, "atp", 0.5, tau=0.3)
    with pytest.raises(LyapunovPruneError, match="uniform has no tau"):
        allocate(llama, "uniform", 0.5, tau=0.3)


def test_parameters_reach_their_schedule(llama: PreTrainedModel) -> None:
    assert allocate(llama, "atp", 0.5, beta=0.02).parameters == {"beta": 0.02}
    found = allocate(llama, "lyapunov", 0.5, profile=profile_of(llama), least=0.9, most=1.05)
    np.testing.assert_allclose([found.amount.min(), found.amount.max()], [0.45, 0.525], rtol=1e-12)
