"""Losses block by block are those of the model's own logits, in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from helpers import hooks_of, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune import perplexity
from lyapunov_prune.forward import scoring
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_structure


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Several blocks of rows and of columns, the last of each smaller."""
    monkeypatch.setattr(scoring, "_ROWS", 16)
    monkeypatch.setattr(scoring, "_COLUMNS", 20)
    with torch.no_grad():
        yield


def scorer(model: PreTrainedModel, ids: torch.Tensor) -> Scorer:
    return Scorer(wrap(model), ids)


def exact(model: PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    """Mean loss of each window, all of it in float64."""
    logits = copy.deepcopy(model).double()(ids).logits[:, :-1]
    return -logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1).numpy()


def with_bias(model: Any) -> Any:
    """A head with a bias, large enough to matter."""
    head = torch.nn.Linear(32, 97)
    head.weight, head.bias.data = model.lm_head.weight, torch.randn(97)
    model.lm_head = head
    return model


def test_losses_agree_with_float64(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    score = scorer(model, ids)
    assert score.blockwise == (family != "gemma2")  # which caps its logits
    losses, state = score(ids)
    np.testing.assert_allclose(losses, exact(model, ids), rtol=1e-5)
    np.testing.assert_allclose(losses, perplexity(model, ids).windows, rtol=1e-6)
    assert torch.equal(state, final_state(find_structure(model), ids))
    assert hooks_of(model) == 0


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (39, 97), (1024, 1024), (40, 96), (7, 98)])
def test_the_size_of_a_block_does_not_matter(
    rows: int, columns: int, llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_ROWS", rows)
    monkeypatch.setattr(scoring, "_COLUMNS", columns)
    np.testing.assert_allclose(scorer(llama, ids)(ids)[0], exact(llama, ids), rtol=1e-5)


def test_a_model_that_reshapes_by_its_text_is_scored_whole() -> None:
    """ProphetNet's forward fails on a block of positions; its losses are those of whole forwards."""
    model = make_zoo("prophetnet")
    windows = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))
    scorer = Scorer(wrap(model), windows)
    assert not scorer.enters
    with torch.no_grad():
        np.testing.assert_allclose(scorer(windows)[0], perplexity(model, windows).windows, rtol=1e-5)


def test_a_head_with_a_bias(ids: torch.Tensor) -> None:
    model = with_bias(make_tiny("llama"))
    score = scorer(model, ids)
    assert score.blockwise
    np.testing.assert_allclose(score(ids)[0], exact(model, ids), rtol=1e-5)
    model.lm_head.bias.data.zero_()
    assert abs(score(ids)[0][0] - exact(with_bias(model), ids)[0]) > 1e-2  # the bias is in it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0625, 0.5, 1.05])
def test_a_scaled_head_uses_the_models_own_logits(scale: float, dtype: torch.dtype, ids: torch.Tensor) -> None:
    """Granite and Cohere multiply the logits."""
    model: Any = make_tiny("llama").to(dtype)
    model.lm_head.register_forward_hook(lambda module, args, output: output * scale)
    score = scorer(model, ids)
    assert not score.blockwise
    np.testing.assert_allclose(score(ids)[0], perplexity(model, ids).windows)


def test_a_later_block_may_tower_over_the_first(ids: torch.Tensor) -> None:
    for height in (50.0, 300.0):  # exp holds the first, in float32, and not the second
        model = with_bias(make_tiny("llama"))
        model.lm_head.bias.data[90] = height
        np.testing.assert_allclose(scorer(model, ids)(ids)[0], exact(model, ids), rtol=1e-5)


def test_large_logits_do_not_overflow(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    model.lm_head.weight.mul_(1000)
    np.testing.assert_allclose(scorer(model, ids)(ids)[0], exact(model, ids), rtol=1e-5)
    assert exact(model, ids).min() > 100


@pytest.mark.parametrize("when", ["before", "after"])
def test_nan_is_told_and_not_hidden(when: str, ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    layer: Any = find_structure(model).layers[2]
    score = scorer(model, ids)
    layer.mlp.down_proj.weight[0, 0] = float("nan")
    if when == "before":
        score = scorer(model, ids)
    losses, state = score(ids)
    assert all(map(math.isnan, losses))
    assert state.isnan().any()


def test_a_window_that_is_not_finite_leaves_the_others_alone(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    score, own = scorer(llama, ids), scorer(llama, ids)(ids)[0]

    def spoil(module: Any, args: Any, output: Any) -> None:
        output[0][1] = float("inf")

    handle = llama.base_model.register_forward_hook(spoil)
    try:
        losses, _ = score(ids)
    finally:
        handle.remove()
    assert not math.isfinite(losses[1])
    assert [losses[0], losses[2]] == [own[0], own[2]]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_a_bfloat16_model(name: str, ids: torch.Tensor) -> None:
    model = make_tiny(name).bfloat16()
    score = scorer(model, ids)
    losses, state = score(ids)
    assert score.blockwise == (name != "gemma2")
    assert state.dtype == torch.bfloat16
    np.testing.assert_allclose(losses, perplexity(model, ids).windows, rtol=2e-3)
    if score.blockwise:
        logits = score.head.double()(state.double())[:, :-1]
        reference = -logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)
        np.testing.assert_allclose(losses, reference, rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_loss_is_below_zero(dtype: torch.dtype, ids: torch.Tensor) -> None:
    """The target's logit is rounded as those that it is held against: unrounded it was larger than all of them."""
    model: Any = make_tiny("llama")
    for layer in model.model.layers:  # nothing moves the state: the token says itself again, and is sure of it
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.lm_head.weight = torch.nn.Parameter(9 * torch.nn.functional.normalize(model.model.embed_tokens.weight))
    model, again = model.to(dtype), ids[:, :1].expand_as(ids)
    score = scorer(model, again)
    assert score.blockwise
    losses, _ = score(again)
    np.testing.assert_allclose(losses, perplexity(model, again).windows, atol=1e-5)
    assert min(losses) > -1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_block_may_be_rounded_otherwise_in_its_last_place(
    dtype: torch.dtype, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS takes another kernel for a block of columns than for the whole product."""
    model, linear = make_tiny("llama").to(dtype), scoring.linear
    monkeypatch.setattr(
        scoring, "linear", lambda *args: torch.nextafter(linear(*args), torch.tensor(torch.inf).to(dtype))
    )
    assert scorer(model, ids).blockwise


def test_no_tensor_of_tokens_by_vocabulary_is_built(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    score = scorer(llama, ids)
    calls: list[int] = []
    handle = llama.get_output_embeddings().register_forward_hook(lambda *args: calls.append(1))
    try:
        score(ids)
    finally:
        handle.remove()
    assert not calls


# What a model does to large logits alone.


def quiet_on_the_first_tokens() -> Any:
    """The first 48 tokens have logits of about 0.01, the others of about 100: the state is the token's embedding."""
    model: Any = make_tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight[:48, 16:] = 0
    model.model.embed_tokens.weight[48:, :16] = 0
    model.model.norm.weight[:16], model.model.norm.weight[16:] = 1e-3, 20.0
    return model


def cap(z: torch.Tensor) -> torch.Tensor:
    return 10 * torch.tanh(z / 10)


class CappedHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cap(super().forward(x))


def cap_by_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: cap(output))


def cap_in_the_head(model: Any) -> None:
    model.lm_head.__class__ = CappedHead


def cap_in_the_forward(model: Any) -> None:
    forward = model.forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits.clamp(-10, 10)
        return output

    model.forward = capped


def cap_before_the_head(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].clamp(-1, 1),))


@pytest.mark.parametrize("add", [cap_by_hook, cap_in_the_head, cap_in_the_forward, cap_before_the_head])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cap_that_small_logits_do_not_show_is_seen(add: Any, dtype: torch.dtype, ids: torch.Tensor) -> None:
    model = quiet_on_the_first_tokens().to(dtype)
    assert scorer(model, ids % 48).blockwise
    add(model)
    windows = torch.cat([ids[:1] % 48, 48 + ids[1:] % 49])
    score = scorer(model, windows)
    assert not score.blockwise
    losses, state = score(windows)
    np.testing.assert_allclose(losses, perplexity(model, windows).windows, rtol=1e-6)
    bare = score._bare(state[1]).float()
    wrong = torch.nn.functional.cross_entropy(bare[:-1], windows[1, 1:]) - losses[1]
    assert wrong > 20  # nats, which the head's matrix alone would add
    torch.testing.assert_close(score.logits(state[1]), model(windows[1:2]).logits[0])


def test_half_precision_takes_the_states_that_it_can_hold(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    model = copy.deepcopy(llama).half()
    assert scorer(model, ids).blockwise
    cap_in_the_forward(model)
    assert not scorer(model, ids).blockwise
