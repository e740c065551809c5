"""Every schedule of sparsities on two families: one kind of object, the budget exactly, or a refusal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import make_tiny
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from lyapunov_prune import LyapunovPruneError, allocate
from lyapunov_prune.allocation import Allocation
from lyapunov_prune.allocation.schedule import SPARSEST
from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections

SPARSITIES = [*SCHEDULES]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_tiny(request.param)


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("schedule", SPARSITIES)
def test_the_mean_is_the_budget_and_the_amounts_are_sparsities(
    model: PreTrainedModel, schedule: str, budget: float, tmp_path: Path
) -> None:
    found = allocate(model, schedule, budget)
    sizes = np.array([p.weight(model).numel() for p in find_projections(wrap(model))])
    assert abs(float((found.amount * sizes).sum() / sizes.sum()) - budget) <= 1e-12
    assert abs(found.mean - budget) <= 1e-12
    assert (found.amount >= 0).all()
    assert (found.amount <= SPARSEST).all()
    assert (np.ptp(found.amount) == 0) == (schedule == "uniform")
    assert (found.schedule, found.unit, found.budget) == (schedule, "sparsity", budget)
    assert found.names == tuple(p.name for p in find_projections(wrap(model)))
    assert found.measured_on == ()
    assert str(Allocation.load(found.save(tmp_path / "allocation.json"))) == str(found)


@pytest.mark.parametrize("schedule", SPARSITIES)
def test_nothing_is_removed_at_0_and_what_cannot_be_met_is_refused(model: PreTrainedModel, schedule: str) -> None:
    assert not allocate(model, schedule, 0.0).amount.any()
    for budget in (-0.1, 1.0, float("nan")):
        with pytest.raises(LyapunovPruneError, match=r"budget|give 0 or more and less than 1"):
            allocate(model, schedule, budget)
    with pytest.raises(LyapunovPruneError, match=r"mean 0\.995"):
        allocate(model, schedule, 0.995)


def test_experts_take_part() -> None:
    config = MixtralConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for schedule in SPARSITIES:
        assert abs(allocate(model, schedule, 0.5).mean - 0.5) <= 1e-12


def test_what_is_missing_or_unknown_is_said(llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match="unknown schedule 'best'"):
        allocate(llama, "best", 0.5)
    with pytest.raises(LyapunovPruneError, match=r"of atp is .*give"):
        allocate(llama, "atp", 0.5, beta="steep")
    for schedule in ("atp", "uniform"):
        with pytest.raises(LyapunovPruneError, match=f"{schedule} has no tau"):
            allocate(llama, schedule, 0.5, tau=0.3)
