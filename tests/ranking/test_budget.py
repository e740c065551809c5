"""Removal under a budget of divergence, against whole logits in float64."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import LAYERS, make_tiny
from scipy.special import rel_entr, softmax
from transformers import PreTrainedModel

from experiments.hierarchies import without_branches
from lyapunov_prune import LyapunovPruneError, NonFiniteError, block_influence, rank_layers, remove_layers
from lyapunov_prune.models.structure import identify
from lyapunov_prune.predictions import skip_divergence
from lyapunov_prune.predictions import tiles as tiles_module
from lyapunov_prune.predictions.divergence import sublayer_divergence
from lyapunov_prune.ranking import BudgetedRemoval, rank_by_divergence, remove_under_budget
from lyapunov_prune.ranking import budget as module
from lyapunov_prune.ranking.ranking import LayerRanking


@pytest.fixture
def ranking(llama: PreTrainedModel, ids: torch.Tensor) -> LayerRanking:
    return rank_by_divergence(skip_divergence(llama, ids))


def exact(model: PreTrainedModel, ids: torch.Tensor, removed: tuple[int, ...], T: float) -> tuple[float, float]:
    """KL and the share of flips of the physically pruned model, float64, from whole logits."""
    twin = copy.deepcopy(model).double()
    return moved(twin, remove_layers(twin, removed), ids, T)


def moved(dense: PreTrainedModel, pruned: PreTrainedModel, ids: torch.Tensor, T: float) -> tuple[float, float]:
    z, z2 = (m(ids).logits[:, :-1].detach().numpy() for m in (dense, pruned))
    kl = rel_entr(softmax(z / T, -1), softmax(z2 / T, -1)).sum(-1).mean()
    return float(kl), float((z.argmax(-1) != z2.argmax(-1)).mean())


@pytest.mark.parametrize(("family", "T"), [("llama", 1.0), ("gpt2", 0.7), ("gemma2", 1.0), ("gpt_neox", 2.0)])
def test_each_number_of_layers_is_that_of_the_pruned_model(
    family: str, T: float, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles_module, "_ROWS", 16)
    monkeypatch.setattr(tiles_module, "_COLUMNS", 40)
    monkeypatch.setattr(module, "_TOGETHER", 2)
    model = make_tiny(family)
    ranking = rank_layers(None, block_influence(model, ids), criterion="bi")
    found = remove_under_budget(model, ids, ranking, 1e9, temperature=T, batch_size=2)
    wanted = [exact(model, ids, ranking.order[:n], T) for n in range(1, LAYERS)]
    np.testing.assert_allclose(found.kl, [kl for kl, _ in wanted], rtol=1e-4)
    np.testing.assert_allclose(found.flipped, [share for _, share in wanted], atol=1e-12)
    assert found.within == LAYERS - 1  # one layer stays
    assert found.predicted is None


@pytest.mark.parametrize("count", range(1, LAYERS - 1))
def test_it_stops_at_the_first_that_is_over(
    llama: PreTrainedModel, ids: torch.Tensor, ranking: LayerRanking, count: int
) -> None:
    whole = remove_under_budget(llama, ids, ranking, 1e9)
    budget = float(whole.kl[:count].max())  # met exactly
    found = remove_under_budget(llama, ids, ranking, budget)
    over = np.flatnonzero(whole.kl > budget)
    assert found.within == (over[0] if len(over) else LAYERS - 1)
    np.testing.assert_array_equal(found.kl, whole.kl[: found.within + 1])
    plan = found.plan()
    assert set(plan.remove) == set(ranking.order[: found.within])
    assert (plan.criterion, plan.measured_on) == ("kl", ranking.measured_on)


def test_the_plan_saw_the_text_of_the_budget_too(
    llama: PreTrainedModel, ids: torch.Tensor, ranking: LayerRanking
) -> None:
    found = remove_under_budget(llama, ids.flip(1), ranking, 1e9)
    assert found.plan().measured_on == (*ranking.measured_on, found.measured_on)


def test_a_larger_set_within_the_budget_does_not_count_after_one_that_is_over(ranking: LayerRanking) -> None:
    made = BudgetedRemoval(ranking, np.array([0.1, 0.9, 0.2]), np.zeros(3), 0.5, 1.0, ranking.measured_on[0])
    assert made.within == 1


def test_the_prediction_is_the_sum_of_the_scores(
    llama: PreTrainedModel, ids: torch.Tensor, ranking: LayerRanking
) -> None:
    found = remove_under_budget(llama, ids, ranking, 1e9)
    assert found.predicted is not None
    for n, predicted in enumerate(found.predicted, 1):
        assert predicted == pytest.approx(math.fsum(sorted(ranking.scores)[:n]))
    # Of one layer the measurement is that of skip_divergence.
    assert found.kl[0] == pytest.approx(skip_divergence(llama, ids).kl[ranking.order[0]], rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("what", ["attention", "mlp"])
def test_parts_of_layers_cost_what_the_pruned_model_costs(
    family: str, what: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny(family)
    ranking = rank_by_divergence(sublayer_divergence(model, ids, what))
    found = remove_under_budget(model, ids, ranking, 1e9, batch_size=2)
    assert found.within == LAYERS  # every layer stays
    monkeypatch.setattr(module, "ROWS", 2)  # shown are those beside the budget
    assert found.brief().removed.tolist() == [LAYERS - 1, LAYERS]
    twin, wanted = copy.deepcopy(model).double(), []
    for n in range(1, LAYERS + 1):
        gone = ranking.order[:n]
        pruned = without_branches(twin, *((gone, ()) if what == "attention" else ((), gone)))
        wanted.append(moved(twin, pruned, ids, 1.0))
    np.testing.assert_allclose(found.kl, [kl for kl, _ in wanted], rtol=1e-4)
    np.testing.assert_allclose(found.flipped, [share for _, share in wanted], atol=1e-12)
    if what == "mlp":
        return  # no plan holds MLPs
    plan = remove_under_budget(model, ids, ranking, float(found.kl[:2].max()), batch_size=2).plan()
    assert set(plan.touched) == set(ranking.order[: found_within(found, 2)])
    with pytest.raises(LyapunovPruneError, match=r"1e-09.*that of layer"):
        remove_under_budget(model, ids, ranking, 1e-9).plan()


def found_within(found: BudgetedRemoval, count: int) -> int:
    """How many go under a budget that is the dearest of the first `count`."""
    over = np.flatnonzero(found.kl > found.kl[:count].max())
    return int(over[0]) if len(over) else len(found.kl)


def test_it_prints_and_comes_back_from_its_file(
    llama: PreTrainedModel, ids: torch.Tensor, ranking: LayerRanking, tmp_path: Path
) -> None:
    found = remove_under_budget(llama, ids, ranking, float(ranking.scores.max()))
    found.save(tmp_path / "budget.json")
    again = BudgetedRemoval.load(tmp_path / "budget.json")
    np.testing.assert_array_equal(again.kl, found.kl)
    assert again.plan().remove == found.plan().remove
    assert f"{found.within} layers by kl within" in str(found)


def test_refusals(llama: PreTrainedModel, ids: torch.Tensor, ranking: LayerRanking) -> None:
    for budget in (0.0, -1.0, math.nan):
        with pytest.raises(LyapunovPruneError):
            remove_under_budget(llama, ids, ranking, budget)
    with pytest.raises(LyapunovPruneError, match=r"no layer .*1e-09"):
        remove_under_budget(llama, ids, ranking, 1e-9).plan()
    with pytest.raises(LyapunovPruneError, match="rank the layers of this model"):
        remove_under_budget(make_tiny("gpt2"), ids, ranking, 1.0)
    with pytest.raises(LyapunovPruneError, match="temperature is 0"):
        remove_under_budget(llama, ids, ranking, 1.0, temperature=0.0)
    one = make_tiny("llama", num_hidden_layers=1)
    with pytest.raises(LyapunovPruneError, match="cannot remove 1 of 1"):
        remove_under_budget(one, ids, rank_layers(None, block_influence(one, ids), criterion="bi"), 1.0)


def test_a_model_that_is_not_finite_is_named(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    ranking = rank_layers(None, block_influence(model, ids), criterion="bi")
    model.model.layers[2].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="layer 2"):
        remove_under_budget(model, ids, replace(ranking, model=identify(model)), 1.0)
    # What is not finite without the layers is over any budget.
    found = remove_under_budget(make_tiny("llama"), ids, ranking, 1e9)
    assert not replace(found, kl=np.array([math.nan, 0.1]), max_kl=math.inf).within
