"""Wanda's mask and its input norms against numpy in float64, to the entry."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import captured, hooks_of, make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.masks import Pattern
from lyapunov_prune.compression.methods.wanda import Wanda
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections


def wanda(W: torch.Tensor, norms: torch.Tensor, sparsity: float, pattern: Pattern | None = None) -> torch.Tensor:
    return Wanda(pattern).compress(W, sparsity, Statistics(norms))


def reference(W: np.ndarray, norms: np.ndarray, sparsity: float) -> np.ndarray:
    """Row by row, entry by entry: of equal scores the earlier goes."""
    out = W.copy()
    for row, weights in zip(out, np.abs(W.astype(np.float64)), strict=True):
        score = weights * norms
        for j in sorted(range(len(score)), key=lambda j: (score[j], j))[: round(sparsity * len(score))]:
            row[j] = 0
    return out


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 12), st.floats(0, 1), st.booleans())
def test_the_mask_is_that_of_the_definition(seed: int, m: int, n: int, sparsity: float, ties: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    W, norms = torch.randn(m, n, generator=g), torch.rand(n, generator=g, dtype=torch.float64)
    if ties:  # few distinct scores
        W, norms = W.sign() * W.abs().ceil(), (2 * norms).ceil()
    found = wanda(W, norms, sparsity)
    np.testing.assert_array_equal(found.numpy(), reference(W.numpy(), norms.numpy(), sparsity))
    assert ((found == 0).sum(1) == round(sparsity * n)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtype_device_and_the_matrix_itself_are_kept(dtype: torch.dtype) -> None:
    W = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, norms = W.clone(), torch.rand(10, dtype=torch.float64)
    found = wanda(W, norms, 0.4)
    assert (found.dtype, found.device) == (W.dtype, W.device)
    assert torch.equal(W, before)
    np.testing.assert_array_equal(found.double(), reference(W.double().numpy(), norms.numpy(), 0.4))
    assert wanda(W.T.contiguous().T, norms, 0.4).equal(found)
    assert wanda(W, norms, 0.04) is W


def test_the_mask_follows_the_inputs_and_not_the_weights_alone() -> None:
    W = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert wanda(W, torch.tensor([40.0, 1.0, 1.0, 1.0]).double(), 0.5).tolist() == [[1.0, 0.0, 0.0, 4.0]]
    assert wanda(W, torch.ones(4).double(), 0.5).tolist() == [[0.0, 0.0, 3.0, 4.0]]
    assert wanda(W, torch.zeros(4).double(), 0.5).tolist() == [[0.0, 0.0, 3.0, 4.0]]


def test_scores_are_compared_in_float64() -> None:
    """Two scores that float32 cannot tell apart."""
    W = torch.tensor([[1.0, 1.0]])
    norms = torch.tensor([1 + 1e-12, 1.0], dtype=torch.float64)
    assert wanda(W, norms, 0.5).tolist() == [[1.0, 0.0]]


def test_a_pattern_keeps_the_best_of_each_group() -> None:
    W = torch.tensor([[1.0, -4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0]])
    norms = torch.tensor([9.0, 1.0, 1.0, 2.0, 1.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    assert wanda(W, norms, 0.5, (2, 4)).tolist() == [[1.0, 0.0, 0.0, 2.0, 0.0, 1.0, 1.0, 0.0]]
    with pytest.raises(LyapunovPruneError, match=r"sparsity 0\.5, not 0\.25"):
        wanda(W, norms, 0.25, (2, 4))


# Input norms.


def test_input_norms_are_those_of_the_tokens_that_enter(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    projections = find_projections(wrap(model))
    found, wanted = input_norms(model, ids, projections), captured(model, ids)
    assert list(found) == [p.name for p in projections]
    for p in projections:
        assert found[p.name].dtype == torch.float64
        assert found[p.name].shape == p.weight(model).shape[1:]
        np.testing.assert_allclose(found[p.name], wanted[p.module], rtol=1e-5)


def test_the_parts_of_a_fused_matrix_share_its_inputs(ids: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    projections = [p for p in find_projections(wrap(model)) if p.module.endswith("h.3.attn.c_attn")]
    assert len(projections) == 12  # queries, keys and values of four heads
    assert len({tuple(norms.tolist()) for norms in input_norms(model, ids, projections).values()}) == 1


def test_only_the_modules_asked_for_are_listened_to(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    projections = find_projections(wrap(llama))[4:6]
    assert list(input_norms(llama, ids, projections)) == [p.name for p in projections]
    assert hooks_of(llama) == 0


def test_a_bfloat16_model_is_summed_in_float64(ids: torch.Tensor) -> None:
    model = make_tiny("llama").bfloat16()
    found, wanted = input_norms(model, ids, find_projections(wrap(model))), captured(model, ids)
    for p in find_projections(wrap(model)):
        np.testing.assert_allclose(found[p.name], wanted[p.module], rtol=1e-2)


def test_a_module_that_took_no_part_is_named(ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    model.model.layers[2].extra = nn.Linear(4, 4)
    with pytest.raises(LyapunovPruneError, match=r"layers\.2\.extra"):
        input_norms(model, ids, find_projections(wrap(model)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_activations_that_are_not_finite_are_refused(bad: float, ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = bad
    with pytest.raises(LyapunovPruneError, match=r"NaN .*calibration"):
        input_norms(model, ids, find_projections(wrap(model)))
    assert hooks_of(model) == 0


def test_dropout_is_off_while_norms_are_taken(ids: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    wanted = captured(model, ids)
    found = input_norms(model.train(), ids, find_projections(wrap(model)))
    assert model.training
    for p in find_projections(wrap(model)):
        np.testing.assert_allclose(found[p.name], wanted[p.module], rtol=1e-5)
