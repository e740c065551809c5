"""How much a method may take under a budget of divergence, against whole logits in float64 and a search of all."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_tiny
from scipy.special import rel_entr, softmax
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, NonFiniteError
from lyapunov_prune.compression import BudgetedCompression, compress_under_budget
from lyapunov_prune.compression import amount as module
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.predictions import tiles as tiles_module
from lyapunov_prune.results.history import history_of

LEVELS = {"sparsity": (0.1, 0.3, 0.5, 0.7, 0.9), "bits": (8.0, 6.0, 4.0, 3.0, 2.0)}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEVELS", LEVELS)


def exact(model: PreTrainedModel, ids: torch.Tensor, **how: Any) -> tuple[float, float]:
    """KL and the share of flips on the last window of the model compressed by the others, from whole logits."""
    small = compress(model, ids[:-1], **how).model
    z, z2 = (copy.deepcopy(m).double()(ids[-1:]).logits[:, :-1].detach().numpy() for m in (model, small))
    kl = rel_entr(softmax(z, -1), softmax(z2, -1)).sum(-1).mean()
    return float(kl), float((z.argmax(-1) != z2.argmax(-1)).mean())


@pytest.mark.parametrize(
    ("family", "method", "unit"),
    [("llama", "wanda", "sparsity"), ("gemma2", "magnitude", "sparsity"), ("gpt2", "rtn", "bits")],
)
def test_the_most_within_the_budget_is_that_of_a_search_of_all(
    family: str, method: str, unit: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles_module, "_ROWS", 16)
    monkeypatch.setattr(tiles_module, "_COLUMNS", 40)
    model = make_tiny(family)
    levels = LEVELS[unit]
    every = np.array([exact(model, ids, method=method, **{unit: level}) for level in levels])
    assert (np.diff(every[:, 0]) > 0).all()
    for most in range(len(levels)):
        budget = float(every[most, 0]) * 1.001
        found, small = compress_under_budget(model, ids, budget, method=method, batch_size=2)
        assert found.amount == levels[most]
        wanted = compress(model, ids[:-1], method=method, **{unit: levels[most]}, batch_size=2)
        assert small.report.matrices == wanted.report.matrices
        assert found.measured_on in small.report.allocation.measured_on
        assert found.measured_on in [on for step in history_of(small.model).steps for on in step.saw]
        for name, tensor in wanted.model.state_dict().items():
            assert torch.equal(small.model.state_dict()[name], tensor), name
        where = [levels.index(amount) for amount in found.amounts]
        assert where == sorted(where)
        np.testing.assert_allclose(found.kl, every[where, 0], rtol=2e-4)
        np.testing.assert_allclose(found.flipped, every[where, 1], atol=1e-12)
    with pytest.raises(LyapunovPruneError, match="raise the budget"):
        compress_under_budget(model, ids, float(every[0, 0]) / 2, method=method)


def test_an_amount_that_the_method_cannot_meet_is_over_any_budget(ids: torch.Tensor) -> None:
    # Rank 1 of a head of GPT-2 (8 × 32) is 16 % of its parameters.
    found, _ = compress_under_budget(make_tiny("gpt2"), ids, 1e9, method="svd")
    assert found.amount < 0.9
    assert math.isnan(found.kl[-1])
    assert not found.to_frame().within.iloc[-1]
    with pytest.raises(LyapunovPruneError, match="group_size"):
        compress_under_budget(make_tiny("gpt2"), ids, 1.0, method="svd", group_size=2)


def test_no_amount_is_compressed_twice(ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make_tiny("llama"), []

    def counted(*args: Any, **how: Any) -> Any:
        calls.append(how["sparsity"])
        return compress(*args, **how)

    monkeypatch.setattr(module, "compress", counted)
    budget = exact(model, ids, method="magnitude", sparsity=0.5)[0] * 1.001
    for later in (False, True):
        found, small = compress_under_budget(model, ids, budget, method="magnitude", folder=tmp_path / "jobs")
        assert found.amount == 0.5
        assert small.report.allocation.mean == pytest.approx(0.5)
        # A finished trial has left no model: the chosen one is made again, and no other.
        assert calls == ([0.5] if later else [*dict.fromkeys(calls)])
        assert len(calls) == (1 if later else len(found.amounts))
        calls.clear()


def test_an_interrupted_search_goes_on(ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make_tiny("llama"), []

    def killed(*args: Any, **how: Any) -> Any:
        calls.append(how["sparsity"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compress(*args, **how)

    whole, _ = compress_under_budget(model, ids, 1e9, method="magnitude")
    monkeypatch.setattr(module, "compress", killed)
    with pytest.raises(KeyboardInterrupt):
        compress_under_budget(model, ids, 1e9, method="magnitude", folder=tmp_path / "jobs")
    again, _ = compress_under_budget(model, ids, 1e9, method="magnitude", folder=tmp_path / "jobs")
    assert calls[0] not in calls[1:]
    np.testing.assert_array_equal(again.kl, whole.kl)
    monkeypatch.undo()
    other, _ = compress_under_budget(model, ids, 1.0, method="wanda", folder=tmp_path / "jobs")
    fresh, _ = compress_under_budget(model, ids, 1.0, method="wanda")
    np.testing.assert_array_equal(other.kl, fresh.kl)


def test_it_prints_and_comes_back_from_its_file(ids: torch.Tensor, tmp_path: Path) -> None:
    found, _ = compress_under_budget(make_tiny("llama"), ids, 1e9, method="magnitude")
    found.save(tmp_path / "budget.json")
    again = BudgetedCompression.load(tmp_path / "budget.json")
    assert again.amount == found.amount == 0.9
    assert "magnitude, uniform: sparsity 0.9 is the most tried within 1e+09 nats a token" in str(again)


def test_refusals(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    for budget in (0.0, -1.0, math.nan):
        with pytest.raises(LyapunovPruneError):
            compress_under_budget(model, ids, budget, method="wanda")
    with pytest.raises(LyapunovPruneError, match="few means to choose among"):
        compress_under_budget(model, ids, 1.0, method="rtn", allocation="bits")
    with pytest.raises(LyapunovPruneError, match="unknown method 'no'"):
        compress_under_budget(model, ids, 1.0, method="no")
    with pytest.raises(LyapunovPruneError, match="schedule 'no'"):
        compress_under_budget(model, ids, 1.0, method="wanda", allocation="no")


def test_a_dense_model_that_is_not_finite_is_named_by_its_layer(ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    with torch.no_grad():
        model.model.layers[2].input_layernorm.weight[0] = torch.nan
    with pytest.raises(NonFiniteError) as caught:
        compress_under_budget(model, ids, 0.1, method="magnitude")
    assert caught.value.layer == 3
