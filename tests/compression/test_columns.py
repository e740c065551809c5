"""Column weights against two forwards in float64, and scores against Wanda of a scaled matrix."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import hooks_of, inputs_of, make_tiny, profile_of
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, allocate, compress
from lyapunov_prune.compression import columns as module
from lyapunov_prune.compression.columns import column_errors, column_weighted
from lyapunov_prune.compression.wanda import wanda
from lyapunov_prune.models.projections import find_projections
from lyapunov_prune.profiles.propagation import direction

EPSILON = 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_the_relative_errors_of_features(family: str, ids: torch.Tensor) -> None:
    """The disturbed model runs alone here, in float64, its first layer's input moved by a hook of the test."""
    model = make_tiny(family)
    found = column_errors(model, ids, epsilon=EPSILON)
    assert hooks_of(model) == 0
    exact = copy.deepcopy(model).double()
    clean = inputs_of(exact, ids)
    first = exact.model.layers[0] if family == "llama" else exact.transformer.h[0]

    def move(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        moved = [h[None] + EPSILON * direction(h[None].float(), k, 0).double() for k, h in enumerate(args[0])]
        return torch.cat(moved), *args[1:]

    handle = first.register_forward_pre_hook(move)
    disturbed = inputs_of(exact, ids)
    handle.remove()
    for p in find_projections(model):
        x, e = clean[p.module], disturbed[p.module] - clean[p.module]
        wanted = (e.square().sum(0) / x.square().sum(0)).sqrt()
        torch.testing.assert_close(found[p.name], wanted, rtol=2e-3, atol=1e-6)


def test_without_strength_it_is_wanda_and_with_it_that_of_scaled_columns(
    llama: PreTrainedModel, ids: torch.Tensor
) -> None:
    allocation = allocate(llama, "atp", 0.5)
    plain = compress(llama, ids, method="wanda", allocation=allocation).model
    none = column_weighted(llama, ids, allocation, strength=0.0)
    for a, b in zip(none.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    weighted = column_weighted(llama, ids, allocation)
    weights, inputs = column_errors(llama, ids), inputs_of(llama, ids)
    first = find_projections(llama)[0]  # the one whose inputs no compression has changed
    W, c = first.weight(llama), weights[first.name]
    kept = wanda(W.double() * c, inputs[first.module].square().sum(0).sqrt(), allocation.of(first.name)) != 0
    assert ((first.weight(weighted) != 0) == kept).float().mean() > 0.995  # inputs here are float64's
    assert not torch.equal(first.weight(weighted), first.weight(plain))
    for p in find_projections(llama):  # row by row as sparse as Wanda's
        assert torch.equal((p.weight(weighted) == 0).sum(1), (p.weight(plain) == 0).sum(1))


def test_what_does_not_fit_is_refused(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="an allocation of bits; give one of sparsity"):
        column_weighted(llama, ids, allocate(llama, "bits", 6.0, profile=profile_of(llama)))
    with pytest.raises(LyapunovPruneError, match="allocate for this model anew"):
        column_weighted(make_tiny("gpt2"), ids, allocate(llama, "uniform", 0.5))
    with pytest.raises(LyapunovPruneError, match="epsilon 0 disturbs nothing"):
        column_errors(llama, ids, epsilon=0)


def test_planted_fault_a_disturbance_of_another_window_is_seen(
    llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = column_errors(llama, ids)
    monkeypatch.setattr(module, "direction", lambda hidden, window, seed: direction(hidden, window + 1, seed))
    name = find_projections(llama)[0].name
    assert not torch.allclose(column_errors(llama, ids)[name], right[name], rtol=1e-2)
