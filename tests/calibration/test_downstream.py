"""Weights of tokens are the gradients of a drawn prediction, and in the mean what an error there does to it."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import as_batch, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.calibration.downstream import token_weights
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection


def weights(model: PreTrainedModel, ids: torch.Tensor, batch_size: int = 1) -> dict[str, torch.Tensor]:
    reading = read(wrap(model), as_batch(model, ids))
    found = token_weights(reading, find_projections(reading.decoder), batch_size)
    return {name: torch.cat(calls) for name, calls in found.items()}


def fisher(model: PreTrainedModel, ids: torch.Tensor, p: Projection) -> torch.Tensor:
    """`tr F_t = Σ_s Σ_v p_s(v) ‖∂ log p_s(v) / ∂y_t‖²` of every token t of one window, by the whole Jacobian."""
    module = model.get_submodule(p.module)

    def logs(shift: torch.Tensor) -> torch.Tensor:
        handle = module.register_forward_hook(lambda m, a, y: y + shift)
        try:
            return model(ids, use_cache=False).logits[0].log_softmax(-1)
        finally:
            handle.remove()

    zero = torch.zeros(ids.shape[1], module.weight.shape[0], dtype=torch.float64)  # type: ignore[union-attr, misc]
    J: torch.Tensor = torch.autograd.functional.jacobian(logs, zero)  # type: ignore[assignment]
    return torch.einsum("sv,svti->t", logs(zero).exp().detach(), J.square())


def test_the_mean_over_draws_is_the_trace_of_the_fisher_information(ids: torch.Tensor) -> None:
    model = make_tiny("llama").double()
    few = ids[:1, :5]
    found = weights(model, few.repeat(1000, 1), batch_size=500)
    here = [p for p in find_projections(wrap(model)) if p.layer == 1]
    for p in here:
        if p.component in ("self_attn.k_proj", "mlp.down_proj"):
            mean, wanted = found[p.module].view(1000, 5).mean(0), fisher(model, few, p)
            torch.testing.assert_close(mean, wanted / wanted.mean(), rtol=0.2, atol=0.02)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen2"])
def test_every_matrix_of_every_token_has_a_weight_of_mean_one(name: str, ids: torch.Tensor) -> None:
    model = make_tiny(name)
    before = copy.deepcopy(model.state_dict())
    found, together = weights(model, ids), weights(model, ids, batch_size=2)
    assert found.keys() == {p.module for p in find_projections(wrap(model))}
    for module, a in found.items():
        assert a.shape == (ids.numel(),)
        assert float(a.mean()) == pytest.approx(1)
        assert float(a.min()) >= 0
        torch.testing.assert_close(together[module], a, rtol=1e-2, atol=1e-3)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_are_not_finite_are_refused(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(LyapunovPruneError, match="gradient"):
        weights(model, ids)


def test_a_prediction_that_nothing_moves_is_refused(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(LyapunovPruneError, match="gradient"):
        weights(model, ids)
