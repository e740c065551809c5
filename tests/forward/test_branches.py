"""A layer is its residual stream plus its branches: what they add must be what the layer does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers import KINDS, OTHERS, PARALLEL, branches_of, make_other, make_tiny

from lyapunov_prune.forward.anatomy import find_anatomy
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_structure


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_stream_and_branches_are_the_layer(name: str, ids: torch.Tensor) -> None:
    model = make_tiny(name) if name in KINDS else make_other(name)
    for (attention, mlp), output in branches_of(model, ids[:, :12]):
        with torch.no_grad():
            one = attention(attention.x).view_as(output)
            two = mlp(mlp.x).view_as(output)
        before, between = attention.x.view_as(output), mlp.x.view_as(output)
        torch.testing.assert_close(before + one + two, output, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(between, before if name in PARALLEL else before + one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(OTHERS))
def test_a_branch_takes_the_norms_that_serve_it_alone(name: str, ids: torch.Tensor) -> None:
    model = make_other(name)
    branches, _ = branches_of(model, ids[:1])[0]
    names = {module: child for child, module in find_structure(model).layers[0].named_children()}
    assert [(names[b.entry], names[b.exit]) for b in branches] == OTHERS[name][1]


def test_planted_fault_a_factor_of_the_layer_is_no_part_of_a_branch(ids: torch.Tensor) -> None:
    """Granite's multiplier: the sum does not come out."""
    config = transformers.GraniteConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        residual_multiplier=0.5,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    (((attention, mlp), output),) = branches_of(transformers.GraniteForCausalLM(config).eval(), ids)
    with torch.no_grad():
        one, two = attention(attention.x), mlp(mlp.x)
    assert not torch.allclose(attention.x + one + two, output, atol=1e-4)
    torch.testing.assert_close(attention.x + 0.5 * (one + two), output, rtol=1e-4, atol=1e-4)


def test_a_layer_that_calls_no_matrix_has_no_parts(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    layer: Any = model.model.layers[1]
    layer.forward = lambda hidden_states, **_: hidden_states
    assert [bool(found.whole) for found in find_anatomy(wrap(model), (0, 1)).values()] == [True, False]
