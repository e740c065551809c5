"""Low-rank updates: the merged model is the model that was trained, and nothing of them is left in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families.zoo import make_zoo
from helpers import hooks_of, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.healing.distillation import update_sizes
from lyapunov_prune.healing.low_rank import low_rank_updates
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections


def randomise(factors: dict[str, torch.nn.Parameter], seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for factor in factors.values():
        factor.data = 0.1 * torch.randn(factor.shape, generator=generator)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gpt_neox"])
def test_the_merged_model_is_the_one_with_the_updates(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    names, keys = [n for n, _ in model.named_parameters()], list(model.state_dict())
    before, held = logits(model, ids), dict(model.named_parameters())
    with low_rank_updates(model, 3, seed=1) as factors:
        torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=0)
        assert {n.rpartition(".")[0] for n in factors} == {p.module for p in find_projections(wrap(model))}
        randomise(factors)
        during = logits(model, ids)
    after = logits(model, ids)
    torch.testing.assert_close(after, during, rtol=1e-5, atol=1e-5 * float(during.abs().max()))
    assert (after - before).abs().max() > 0.1
    assert [n for n, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert all(p is held[n] for n, p in model.named_parameters())  # what was tied stays tied
    assert hooks_of(model) == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_update_is_the_product_rounded_once(family: str) -> None:
    model = make_tiny(family)
    before = copy.deepcopy(model)
    with low_rank_updates(model, 2) as factors:
        randomise(factors)
    for name in {p.module for p in find_projections(wrap(model))}:
        W = before.get_submodule(name).weight.detach().double()
        update = factors[f"{name}.B"].detach().double() @ factors[f"{name}.A"].detach().double()
        wanted = (W + (update.T if family == "gpt2" else update)).float()
        assert torch.equal(model.get_submodule(name).weight, wanted)
        assert torch.linalg.matrix_rank(update) == 2
    projections = {f"{p.module}.weight" for p in find_projections(wrap(model))}
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in before.named_parameters() if n not in projections)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_are_wide_over_a_narrow_model_and_each_sum_is_rounded_once(
    dtype: torch.dtype, ids: torch.Tensor
) -> None:
    model = make_tiny("llama").to(dtype)
    before, projection = copy.deepcopy(model), model.model.layers[2].mlp.up_proj
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    with low_rank_updates(model, 2) as factors:
        assert {factor.dtype for factor in factors.values()} == {torch.float32}
        randomise(factors)
        A, B = (factors[f"model.layers.2.mlp.up_proj.{name}"] for name in "AB")
        with torch.no_grad():
            plain = before.model.layers[2].mlp.up_proj(x)
            wanted = (plain.double() + x.double() @ A.double().T @ B.double().T).to(dtype)
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(projection(x).float(), wanted.float(), rtol=unit, atol=unit)
            assert (
                projection(x) == wanted
            ).float().mean() > 0.99  # but for sums in float32 that lie between two values
        model(ids, use_cache=False).logits.float().square().mean().backward()
        assert all(factor.grad.dtype == torch.float32 for factor in factors.values())
    merged = (before.model.layers[2].mlp.up_proj.weight.double() + B.double() @ A.double()).to(dtype)
    assert torch.equal(projection.weight, merged)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_an_exception_leaves_the_weights_as_they_were(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    before = copy.deepcopy(model.state_dict())

    def interrupted() -> None:
        with low_rank_updates(model, 2) as factors:
            randomise(factors)
            logits(model, ids)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert hooks_of(model) == 0
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_shared_weight_gets_one_update(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    layers = model.model.layers
    layers[4].mlp.up_proj.weight = layers[1].mlp.up_proj.weight  # one parameter in two modules
    layers[5].mlp = layers[2].mlp  # one module in two layers
    with low_rank_updates(model, 2) as factors:
        assert "model.layers.1.mlp.up_proj.A" in factors
        assert not {"model.layers.4.mlp.up_proj.A", "model.layers.5.mlp.up_proj.A"} & factors.keys()
        randomise(factors)
        during = logits(model, ids)
    torch.testing.assert_close(logits(model, ids), during, rtol=1e-5, atol=1e-4)
    assert layers[4].mlp.up_proj.weight is layers[1].mlp.up_proj.weight


def test_the_seed_says_what_is_drawn() -> None:
    model = make_tiny("llama")
    drawn = []
    for seed in (1, 1, 2):
        with low_rank_updates(model, 2, seed) as factors:
            drawn.append(factors["model.layers.0.mlp.up_proj.A"])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("rank", [0, -1, 17])
def test_a_rank_that_the_smallest_matrix_has_not_is_refused(rank: int) -> None:
    model = make_tiny("llama")
    with pytest.raises(LyapunovPruneError, match=f"rank {rank} "), low_rank_updates(model, rank):
        pass
    assert hooks_of(model) == 0


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "jetmoe"])
def test_every_expert_has_an_update_of_its_own(name: str, ids: torch.Tensor) -> None:
    model = make_zoo(name)
    before, held = copy.deepcopy(model), dict(model.named_parameters())
    experts = [p for p in find_projections(wrap(model)) if p.expert is not None]
    with low_rank_updates(model, 2) as factors:
        torch.testing.assert_close(logits(model, ids), logits(before, ids), rtol=0, atol=0)
        randomise(factors)
        during = logits(model, ids)
        sizes = update_sizes(model, factors)
        model(ids, use_cache=False).logits.square().mean().backward()
        assert all(factor.grad is not None for factor in factors.values())
    torch.testing.assert_close(logits(model, ids), during, rtol=1e-4, atol=1e-4 * float(during.abs().max()))
    assert hooks_of(model) == 0
    assert all(p is held[n] for n, p in model.named_parameters())
    for p in experts:
        key = p.module if p.parameter == "weight" else f"{p.module}.{p.parameter}"
        A, B = (factors[f"{key}.{side}"].detach()[p.expert].double() for side in "AB")
        assert A.shape[1] == p.weight(model).shape[1]
        assert torch.equal(p.weight(model), (p.weight(before).double() + B @ A).float())
        assert sizes[f"{key}.B"] > 0


def test_an_exception_in_a_forward_leaves_experts_as_they_were() -> None:
    model = make_zoo("mixtral")
    module: Any = model.get_submodule("model.layers.1.mlp.experts")
    held = module.gate_up_proj
    with pytest.raises(RuntimeError), low_rank_updates(model, 2):
        module(torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))
    assert module.gate_up_proj is held
    assert hooks_of(model) == 0
