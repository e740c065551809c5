"""The removal curve: physical removal, paired intervals, each set of layers measured once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import as_batch, words_of
from transformers import PreTrainedModel

from experiments import removal_curve as removal
from experiments.removal_curve import RemovalCurve, evaluate_removals, perplexity_figure
from lyapunov_prune import PruningPlan, perplexity, remove_layers


@pytest.fixture
def ids(ids: torch.Tensor) -> torch.Tensor:
    """Four windows: fewer have no interval, and NaN equals nothing."""
    return ids.reshape(4, 30)


@pytest.fixture
def plans(llama: PreTrainedModel) -> dict[str, list[PruningPlan]]:
    one, two, other = (PruningPlan.given(llama, layers) for layers in ([2], [2, 3], [4]))
    return {"rho": [one, two], "bi": [other, two]}


def test_rows_are_the_pruned_models_perplexities(
    llama: PreTrainedModel, plans: dict[str, list[PruningPlan]], ids: torch.Tensor
) -> None:
    curve = evaluate_removals(llama, plans, as_batch(llama, ids))
    assert [(r.criterion, r.removed) for r in curve.rows] == [
        ("dense", ()),
        ("rho", (2,)),
        ("rho", (2, 3)),
        ("bi", (4,)),
        ("bi", (2, 3)),
    ]
    assert curve.dense.perplexity == perplexity(llama, ids).value
    for row in curve.rows[1:]:
        assert row.perplexity == perplexity(remove_layers(llama, row.removed), ids).value
        assert row.low <= row.degradation <= row.high
        assert row.parameters < curve.dense.parameters


def test_a_set_of_layers_is_measured_once(
    llama: PreTrainedModel,
    plans: dict[str, list[PruningPlan]],
    ids: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(removal, "remove_layers", lambda m, p: calls.append(p.remove) or remove_layers(m, p))
    evaluate_removals(llama, plans, as_batch(llama, ids))
    assert calls == [(2,), (2, 3), (4,)]


def test_saves_and_loads(
    llama: PreTrainedModel, plans: dict[str, list[PruningPlan]], ids: torch.Tensor, tmp_path: Path
) -> None:
    curve = evaluate_removals(llama, plans, as_batch(llama, ids))
    assert str(RemovalCurve.load(curve.save(tmp_path / "removal.json"))) == str(curve)
    assert {"rho", "bi", "perplexity", "layers removed"} <= set(words_of(perplexity_figure(curve)))
