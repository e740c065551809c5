"""Other weights are there inside the block, and the model's own bit for bit after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same, bits, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.forward.replacement import replaced
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection


def half(model: PreTrainedModel, projections: tuple[Projection, ...]) -> dict[Projection, torch.Tensor]:
    return {p: p.weight(model) / 2 for p in projections}


def test_the_model_runs_as_one_whose_weights_were_overwritten(family: str, ids: torch.Tensor) -> None:
    model, twin = make_tiny(family), make_tiny(family)
    before, dense = bits(model), model(ids).logits
    projections = find_projections(wrap(model))
    for chosen in (projections[:1], projections[3:9], projections[1::2], projections):
        weights = half(model, chosen)
        for p in projections:
            p.weight(twin).copy_(weights.get(p, p.weight(model)))
        with replaced(model, weights), torch.no_grad():
            assert torch.equal(model(ids).logits, twin(ids).logits)
            assert not torch.equal(model(ids).logits, dense)
    assert_same(model, before)
    assert torch.equal(model(ids).logits, dense)


def test_the_model_is_restored_after_an_exception() -> None:
    model = make_tiny("gpt2")
    before = bits(model)
    with pytest.raises(RuntimeError, match="planted"), replaced(model, half(model, find_projections(wrap(model)))):
        raise RuntimeError("planted")
    assert_same(model, before)


def test_a_matrix_of_another_shape_changes_nothing() -> None:
    model = make_tiny("llama")
    before, first, *_, last = bits(model), *find_projections(wrap(model))
    with pytest.raises(RuntimeError), replaced(model, {first: first.weight(model), last: torch.zeros(5, 7)}):
        pytest.fail("the block ran")
    assert_same(model, before)


def test_only_the_rows_of_a_fused_matrix_are_replaced() -> None:
    model = make_tiny("gpt2")
    query = next(p for p in find_projections(wrap(model)) if p.component == "attn.c_attn.k" and p.head == 2)
    module: Any = model.get_submodule(query.module)
    own = module.weight.detach().clone()
    with replaced(model, {query: torch.zeros_like(query.weight(model))}):
        zero = (module.weight == 0).all(0)
        assert zero.nonzero().flatten().tolist() == list(range(query.start, query.stop))
        assert torch.equal(module.weight[:, ~zero], own[:, ~zero])


def test_a_tensor_tied_to_the_replaced_one_keeps_its_own() -> None:
    model: Any = make_tiny("llama")
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.up_proj.weight = first.up_proj.weight
    chosen = next(p for p in find_projections(wrap(model)) if p.name == "model.layers.0.mlp.up_proj")
    with replaced(model, {chosen: torch.zeros_like(chosen.weight(model))}):
        assert not first.up_proj.weight.any()
        assert second.up_proj.weight.any()
    assert first.up_proj.weight is second.up_proj.weight


def test_the_parameter_stays_one_of_its_kind() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = make_tiny("llama").to(dtype)
        p = find_projections(wrap(model))[0]
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_(dtype == torch.float32)
        with replaced(model, {p: p.weight(model).double()}):
            new = model.model.layers[0].self_attn.q_proj.weight
            assert isinstance(new, torch.nn.Parameter)
            assert new.dtype == dtype
            assert new.requires_grad == (dtype == torch.float32)
            assert torch.equal(new, p.weight(model))


def test_blocks_inside_each_other_end_in_turn() -> None:
    model = make_tiny("llama")
    before = bits(model)
    p, other = find_projections(wrap(model))[:2]
    with replaced(model, {p: p.weight(model) * 0 + 1}):
        with replaced(model, {p: p.weight(model) * 0 + 2, other: other.weight(model) * 0}):
            assert (p.weight(model) == 2).all()
        assert (p.weight(model) == 1).all()
        assert other.weight(model).any()
    assert_same(model, before)
