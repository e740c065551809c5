"""The divergence of one rounded layer against two whole models, and what the bits that it shares out are worth."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, assert_same, bits, hooks_of, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import Matrices
from lyapunov_prune.allocation.bit_widths import evenly
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.compression.held_out import RoundingCost
from lyapunov_prune.compression.methods.gptq import GPTQ
from lyapunov_prune.compression.methods.rtn import RoundToNearest
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections


def divergence(model: PreTrainedModel, other: PreTrainedModel, ids: torch.Tensor) -> float:
    with torch.no_grad():
        p, q = (m(ids).logits[:, :-1].double().log_softmax(-1) for m in (model, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_cost_is_that_of_a_model_with_one_rounded_layer(family: str, ids: torch.Tensor) -> None:
    model, few = make_tiny(family), ids[:3, :20]
    costs = RoundingCost(read(wrap(model), few), RoundToNearest(), 2)
    before = bits(model)
    found = costs((2, 4, 16))
    assert_same(model, before)
    assert hooks_of(model) == 0
    assert found.shape == (LAYERS, 3)
    assert not found[:, 2].any()
    for layer in (0, 3, 5):
        for column, width in enumerate((2, 4)):
            other = copy.deepcopy(model)
            for p in find_projections(wrap(other)):
                if p.layer == layer:
                    W = p.weight(other)
                    W.data.copy_(RoundToNearest().compress(W, width))
            assert found[layer, column] == pytest.approx(divergence(model, other, few[:2]), rel=1e-3)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_all_together_are_judged_on_windows_that_the_costs_did_not_see(method: str, ids: torch.Tensor) -> None:
    model, few = make_tiny("llama"), ids[:3, :20]
    before = bits(model)
    even = evenly(Matrices.of(model), 4.5, (3, 4, 8, 16))
    dense = evenly(Matrices.of(model), 16, (3, 4, 8, 16))
    found = RoundingCost(read(wrap(model), few), METHODS.make(method), 1).together((even, dense))
    assert_same(model, before)
    assert found[1] == 0
    if method == "rtn":
        small = compress(model, method="rtn", allocation=even).model
        assert found[0] == pytest.approx(divergence(model, small, few[2:]), rel=1e-3)
    assert found[0] > 0
    with pytest.raises(LyapunovPruneError):
        RoundingCost(read(wrap(model), few[:1]), METHODS.make(method), 1)


def test_a_method_that_goes_by_statistics_takes_those_of_the_dense_model(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    found = RoundingCost(read(wrap(model), ids), GPTQ(), 1)((3,))
    half = ids[: (len(ids) + 1) // 2]
    in_order = compress(model, half, method="gptq", bits=3).model
    other = copy.deepcopy(model)
    for p, q in zip(find_projections(wrap(other)), find_projections(wrap(in_order)), strict=True):
        if p.layer == 0:  # of layer 0 nothing before it is compressed
            p.weight(other).data.copy_(q.weight(in_order))
    assert found[0, 0] == pytest.approx(divergence(model, other, half), rel=1e-3)


def test_compress_shares_bits_out_by_it(ids: torch.Tensor) -> None:
    """Nearer to the dense prediction than 4 bits everywhere; 16 leaves a layer as it is."""
    model = make_tiny("llama")
    how: dict[str, Any] = {"method": "rtn", "bits": 4.5}
    done = compress(model, ids, allocation="bits-kl", **how)
    allocation = done.report.allocation
    assert len({*allocation.by_layer()}) > 1
    assert allocation.mean <= 4.5
    assert done.report.saw
    for p in find_projections(wrap(model)):
        width, W = allocation.of(p.name), p.weight(model)
        wanted = W if width == 16 else RoundToNearest().compress(W, width)
        assert torch.equal(p.weight(done.model), wanted), p.name
    even = compress(model, ids, method="rtn", bits=4).model
    assert divergence(model, done.model, ids) < divergence(model, even, ids)
    assert np.isfinite(allocation.parameters["cost"])
