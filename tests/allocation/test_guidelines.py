"""The three rules, on models that name their matrices differently."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_tiny
from transformers import AutoModelForCausalLM, GPTBigCodeConfig, MambaConfig, PreTrainedModel

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.allocation import Allocation
from lyapunov_prune.allocation.schedules.guidelines import Guidelines
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap


def guidelines(model: PreTrainedModel, budget: float, **options: Any) -> Allocation:
    return Guidelines(**options).allocate(model, budget)


# What enters the MLP, and the keys and values, by the ends of their names.
ENDS = {
    "llama": (("gate_proj", "up_proj"), ("k_proj", "v_proj")),
    "gpt2": (("c_fc",), tuple(f":{part}{head}" for part in "kv" for head in range(4))),
    "phi3": (("gate_up_proj:gate", "gate_up_proj:up"), (":k", ":v")),
}


@pytest.mark.parametrize("name", list(ENDS))
@pytest.mark.parametrize("budget", [0.3, 0.5])
def test_the_rules_hold(name: str, budget: float) -> None:
    found = guidelines(make_tiny(name), budget, ceiling=0.8, extra=0.15)
    entering, first = ENDS[name]
    rest: set[float] = set()
    keys: set[float] = set()
    for matrix, layer, amount in zip(found.names, found.layers, found.amount, strict=True):
        if matrix.endswith(entering) and layer < 2:
            assert amount == 0
        else:
            (keys if matrix.endswith(first) else rest).add(amount)
    assert len(keys) == len(rest) == 1
    assert max(keys) == pytest.approx(min(max(rest) + 0.15, 0.8), rel=1e-14)
    assert abs(found.mean - budget) <= 1e-12


def test_a_budget_beyond_the_ceiling_is_refused(llama: PreTrainedModel) -> None:
    most = guidelines(llama, 0.5, ceiling=0.7).to_frame()
    reach = 0.7 * (1 - most[most["sparsity"] == 0]["entries"].sum() / most["entries"].sum())
    assert guidelines(llama, reach, ceiling=0.7).amount.max() == pytest.approx(0.7)
    with pytest.raises(LyapunovPruneError, match=f"reaches 0 to {reach:.6g}"):
        guidelines(llama, reach + 1e-6, ceiling=0.7)


def test_without_protection_and_extra_it_is_uniform(llama: PreTrainedModel) -> None:
    np.testing.assert_allclose(guidelines(llama, 0.4, extra=0, protected=0).amount, 0.4, rtol=1e-12)


@pytest.mark.parametrize("bad", [{"ceiling": 0}, {"ceiling": 1}, {"extra": -1}, {"protected": -1}, {"protected": 1.5}])
def test_parameters_without_sense_are_refused(llama: PreTrainedModel, bad: dict[str, float]) -> None:
    with pytest.raises(LyapunovPruneError, match=r"ceiling.*0\.99|(extra|protected) of guidelines"):
        guidelines(llama, 0.5, **bad)  # type: ignore[arg-type]


def test_a_model_that_the_rules_do_not_speak_of_is_refused() -> None:
    fused = AutoModelForCausalLM.from_config(GPTBigCodeConfig(vocab_size=97, n_embd=16, n_layer=2, n_head=2))
    space = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2))
    for model in (fused, space):
        with pytest.raises(LyapunovPruneError, match="keys and values"):
            guidelines(model, 0.3)


def test_the_measured_threshold_is_the_ceiling(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    by, on = read(wrap(llama), ids[:1]).measured_on(), read(wrap(llama), ids[1:]).measured_on()
    found = guidelines(llama, 0.5, ceiling=SimpleNamespace(threshold=0.6, measured_on=on, calibrated_on=by))
    np.testing.assert_array_equal(found.amount, guidelines(llama, 0.5, ceiling=0.6).amount)
    assert found.amount.max() == pytest.approx(0.6)
    assert found.parameters["ceiling"] == 0.6
    assert found.measured_on == (by, on)


def test_a_threshold_that_is_none_or_another_model_s_is_refused(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    on = read(wrap(llama), ids).measured_on()
    none = SimpleNamespace(threshold=None, measured_on=on, calibrated_on=None)
    with pytest.raises(LyapunovPruneError, match=r"s\*.*ceiling"):
        guidelines(llama, 0.5, ceiling=none)
    with pytest.raises(LyapunovPruneError, match=r"is of .*, not of"):
        guidelines(make_tiny("llama", seed=1), 0.5, ceiling=SimpleNamespace(**{**vars(none), "threshold": 0.6}))
    with pytest.raises(LyapunovPruneError, match=r"ceiling.*'high'"):
        guidelines(llama, 0.5, ceiling="high")  # type: ignore[arg-type]
