"""A masked expert is chosen for no token, the others with the weights of a router that lacks its row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import MIXTURES, make_mixture, operated

from lyapunov_prune.forward.masking import masked_experts
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.mixtures import find_mixtures
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import ExpertsGone

IDS = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def chosen_in(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The experts and weights that every router gives to the tokens."""
    structure, seen = find_structure(model), list[tuple[torch.Tensor, torch.Tensor]]()
    mixtures = find_mixtures(structure)
    modules = [structure.layers[i].get_submodule(m.experts) for i, m in mixtures.layers.items()]

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        order = args[1].argsort(-1)
        seen.append((args[1].gather(-1, order), args[2].gather(-1, order)))

    with hooked(before=[(module, hook) for module in modules]):
        model(IDS)
    return seen


@pytest.mark.parametrize("name", MIXTURES)
def test_a_masked_router_is_one_without_the_rows(name: str) -> None:
    model = make_mixture(name)
    structure = find_structure(model)
    gone = dict.fromkeys(find_mixtures(structure).layers, (1, 6))
    before = model.state_dict()
    dense = model(IDS).logits
    with masked_experts(wrap(model), gone):
        masked = chosen_in(model)
        logits = model(IDS).logits
    assert all(tensor.equal(before[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(model(IDS).logits, dense)
    model = operated(model, PruningPlan.given(model, ExpertsGone((), gone)))
    stay = torch.tensor([0, 2, 3, 4, 5, 7, 8, 9])  # LongCat chooses among ten, of which two are no experts
    for (experts, weights), (others, wanted) in zip(masked, chosen_in(model), strict=True):
        assert torch.equal(experts, stay[others])
        assert torch.allclose(weights, wanted, rtol=1e-5)
    assert torch.allclose(logits, model(IDS).logits, atol=1e-5)
    assert not torch.allclose(logits, dense, atol=1e-3)


def test_nothing_is_masked_where_no_expert_goes_and_all_is_put_back_after_an_error() -> None:
    model = make_mixture("deepseek_v3")
    dense = model(IDS).logits
    with masked_experts(wrap(model), {1: ()}):
        assert torch.equal(model(IDS).logits, dense)
    with pytest.raises(ZeroDivisionError), masked_experts(wrap(model), {1: (0,)}):
        raise ZeroDivisionError
    assert torch.equal(model(IDS).logits, dense)
