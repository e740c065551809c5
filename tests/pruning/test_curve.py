"""The removal curve: physical removal, paired intervals, each set of layers measured once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lyapunov_prune import PruningPlan, perplexity, remove_layers
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.pruning import curve as removal
from lyapunov_prune.pruning.curve import RemovalCurve, evaluate_removals


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
    curve = evaluate_removals(llama, plans, ids)
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
    evaluate_removals(llama, plans, ids)
    assert calls == [(2,), (2, 3), (4,)]


def test_a_dense_perplexity_that_is_known_is_not_measured_again(
    llama: PreTrainedModel,
    plans: dict[str, list[PruningPlan]],
    ids: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted, dense, of = evaluate_removals(llama, plans, ids), perplexity(llama, ids), []
    monkeypatch.setattr(removal, "perplexity", lambda m, *a, **k: of.append(m) or perplexity(m, *a, **k))
    assert evaluate_removals(llama, plans, ids, dense=dense) == wanted
    assert llama not in of
    with pytest.raises(LyapunovPruneError, match="another model or text"):
        evaluate_removals(llama, plans, ids[:2], dense=dense)


def test_saves_and_loads(
    llama: PreTrainedModel, plans: dict[str, list[PruningPlan]], ids: torch.Tensor, tmp_path: Path
) -> None:
    curve = evaluate_removals(llama, plans, ids)
    assert str(RemovalCurve.load(curve.save(tmp_path / "removal.json"))) == str(curve)
