"""Jacobian norms against full Jacobians in float64, from formulas written out for each family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, TINY, make_tiny, moe, words_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from experiments.jacobians import JacobianNorms, _signs, jacobian_figure, largest_stretch, sublayer_jacobians
from lyapunov_prune import LyapunovPruneError, NonFiniteError
from lyapunov_prune.models.structure import find_structure

Map = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def window(ids: torch.Tensor) -> torch.Tensor:
    return ids[:1, :4]


def attention_and_mlp(kind: str, layer: Any, kwargs: dict[str, Any]) -> tuple[Map, Map]:
    """The branches of a layer of this model type, as its paper writes them."""
    if kind == "gpt2":
        return lambda x: layer.attn(layer.ln_1(x), **kwargs)[0], lambda x: layer.mlp(layer.ln_2(x))
    if kind == "gpt_neox":
        return (
            lambda x: layer.attention(layer.input_layernorm(x), **kwargs)[0],
            lambda x: layer.mlp(layer.post_attention_layernorm(x)),
        )
    if kind == "opt":
        return (
            lambda x: layer.self_attn(hidden_states=layer.self_attn_layer_norm(x), **kwargs)[0],
            lambda x: layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x)))),
        )
    if kind.startswith("gemma"):
        return (
            lambda x: layer.post_attention_layernorm(
                layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0]
            ),
            lambda x: layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x))),
        )
    return (
        lambda x: layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0],
        lambda x: layer.mlp(layer.post_attention_layernorm(x)),
    )


def full_jacobians(name: str, model: PreTrainedModel, ids: torch.Tensor) -> list[list[torch.Tensor]]:
    """J of both branches of every layer, float64, tokens · d square."""
    model = model.double()
    kind = TINY[name][0]
    found: list[list[torch.Tensor]] = []

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        h = args[0] if args else kwargs["hidden_states"]
        kwargs = {k: v for k, v in kwargs.items() if k != "hidden_states"}
        if kind == "gpt2":
            kwargs = {"attention_mask": args[2] if len(args) > 2 else kwargs.get("attention_mask")}
        attention, mlp = attention_and_mlp(kind, layer, kwargs)
        middle = h if kind == "gpt_neox" else h + attention(h)
        with torch.enable_grad():
            pair = [torch.autograd.functional.jacobian(f, x) for f, x in ((attention, h), (mlp, middle))]
        found.append([J.reshape(h.numel(), h.numel()) for J in pair])

    handles = [x.register_forward_pre_hook(before, with_kwargs=True) for x in find_structure(model).layers]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def norms(found: JacobianNorms) -> np.ndarray:
    return np.array([found.attention_norm, found.mlp_norm]).T


def rises(found: JacobianNorms) -> np.ndarray:
    return np.array([found.attention_rise, found.mlp_rise]).T


def estimated(reference: list[list[torch.Tensor]], number: int, steps: int, probes: int) -> np.ndarray:
    """Norm, squared gain and rise (3, L, 2) by full Jacobians and the same random signs as of window `number`."""
    generator = torch.Generator().manual_seed(number)
    found = np.empty((3, len(reference), 2))
    for layer, pair in enumerate(reference):
        for k, J in enumerate(pair):
            wide, size = J.double(), len(J)
            start = _signs(size, generator)
            norm, rise = largest_stretch(lambda v, J=wide: J @ v, lambda u, J=wide: J.T @ u, start, steps)
            drawn = [float((wide @ _signs(size, generator)).square().sum()) / size for _ in range(probes)]
            found[:, layer, k] = norm, np.mean(drawn), rise
    return found


def gains(found: JacobianNorms) -> np.ndarray:
    return np.array([found.attention_gain, found.mlp_gain]).T


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt", "gemma2", "llama"])  # each form of `attention_and_mlp`
def test_agrees_with_the_full_jacobian_in_float64(name: str, window: torch.Tensor) -> None:
    model = make_tiny(name, num_hidden_layers=3)
    found = sublayer_jacobians(model, window, steps=16, probes=24)
    reference = full_jacobians(name, model, window)
    exact = np.array([[float(torch.linalg.matrix_norm(J, 2)) for J in pair] for pair in reference])
    np.testing.assert_allclose(norms(found), exact, rtol=1e-2)
    assert (norms(found) <= exact * (1 + 1e-4)).all()  # from below, but for float32
    root = np.array([[float(J.square().sum() / len(J)) ** 0.5 for J in pair] for pair in reference])
    np.testing.assert_allclose(gains(found), root, rtol=0.15)
    np.testing.assert_allclose(gains(found), np.sqrt(estimated(reference, 0, 16, 24)[1]), rtol=1e-3)
    assert (gains(found) <= norms(found) * (1 + 1e-4)).all()


def test_in_float64_the_estimate_converges_to_the_norm(window: torch.Tensor) -> None:
    """GPT-2, whose norm does not pass through float32."""
    model = make_tiny("gpt2", num_hidden_layers=2).double()
    found = sublayer_jacobians(model, window, steps=60, probes=1)
    reference = full_jacobians("gpt2", model, window)
    exact = [[float(torch.linalg.matrix_norm(J, 2)) for J in pair] for pair in reference]
    np.testing.assert_allclose(norms(found), exact, rtol=1e-9)
    assert max(found.attention_rise.max(), found.mlp_rise.max()) < 1e-9


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 12), st.integers(2, 14), st.floats(1e-3, 1e3))
def test_the_stretch_comes_from_below_and_ends_exact(seed: int, m: int, n: int, steps: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    J = scale * torch.randn(m, n, generator=generator, dtype=torch.float64)
    start = torch.randn(n, generator=generator, dtype=torch.float64)
    exact = float(torch.linalg.matrix_norm(J, 2))
    last = 0.0
    for count in range(2, steps + 1):
        norm, rise = largest_stretch(lambda v: J @ v, lambda u: J.T @ u, start, count)
        assert last * (1 - 1e-12) <= norm <= exact * (1 + 1e-12)
        assert rise >= -1e-12
        if rise and last:
            assert rise == pytest.approx(norm / last - 1, abs=1e-9)
        last = norm
    if steps >= min(m, n) + 1:
        assert norm == pytest.approx(exact, rel=1e-6)
    # As many steps of the power iteration reach no further.
    v = start
    for _ in range(steps - 1):
        v = J.T @ (J @ v)
        v = v / v.norm()
    assert norm >= float((J @ v).norm()) * (1 - 1e-9)


def test_a_map_of_nothing_is_zero() -> None:
    zero = torch.zeros(3, 3, dtype=torch.float64)
    assert largest_stretch(lambda v: zero @ v, lambda u: zero @ u, torch.ones(3).double(), 5) == (0.0, 0.0)


def test_what_is_scaled_in_a_branch_scales_its_norm_and_no_other_before(window: torch.Tensor) -> None:
    model = make_tiny("llama").double()
    right = norms(sublayer_jacobians(model, window))
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight *= 3
        model.model.layers[4].self_attn.o_proj.weight.zero_()
    found = sublayer_jacobians(model, window)
    np.testing.assert_allclose(norms(found)[:2], right[:2], rtol=1e-9)
    assert norms(found)[2, 0] == pytest.approx(right[2, 0])
    assert norms(found)[2, 1] == pytest.approx(3 * right[2, 1])
    assert norms(found)[4, 0] == 0
    assert found.attention_gain[4] == 0
    # A residual stream a thousand times larger has a thousandth of the Jacobian: the norm divides by it.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        one = norms(sublayer_jacobians(model, window))[0]
        model.model.embed_tokens.weight *= 1e3
        two = norms(sublayer_jacobians(model, window))[0]
    assert two[1] == pytest.approx(one[1] / 1e3, rel=1e-2)


def test_windows_are_taken_one_by_one(ids: torch.Tensor) -> None:
    """Norm and rise are the largest of all windows, gains their root mean square."""
    model = make_tiny("gpt2", num_hidden_layers=2).double()
    together = sublayer_jacobians(model, ids[:, :6], steps=8, probes=3)
    references = [full_jacobians("gpt2", model, row.unsqueeze(0)) for row in ids[:, :6]]
    apart = np.array([estimated(reference, number, 8, 3) for number, reference in enumerate(references)])
    np.testing.assert_allclose(norms(together), apart[:, 0].max(0), rtol=1e-9)
    np.testing.assert_allclose(gains(together), np.sqrt(apart[:, 1].mean(0)), rtol=1e-9)
    np.testing.assert_allclose(rises(together), apart[:, 2].max(0), rtol=1e-6)


def test_post_norm_layers_count_the_norm_after_attention(window: torch.Tensor) -> None:
    """OPT-350m's order: the stream itself is normed, and the MLP is fed by that norm."""
    model = make_tiny("opt", do_layer_norm_before=False, num_hidden_layers=2).double()
    found = sublayer_jacobians(model, window, steps=60)
    layer: Any = model.model.decoder.layers[0]
    calls: list[Any] = []
    layer.register_forward_pre_hook(lambda m, args, kwargs: calls.append((args[0], kwargs)), with_kwargs=True)
    with torch.no_grad():
        model(window, use_cache=False)
        h, kwargs = calls[0]

        def attention(x: torch.Tensor) -> torch.Tensor:
            return layer.self_attn(hidden_states=x, **kwargs)[0]

        def mlp(x: torch.Tensor) -> torch.Tensor:
            return layer.fc2(layer.activation_fn(layer.fc1(layer.self_attn_layer_norm(x))))

        middle = h + attention(h)
    with sdpa_kernel(SDPBackend.MATH):
        for f, x, norm in ((attention, h, found.attention_norm), (mlp, middle, found.mlp_norm)):
            J = torch.autograd.functional.jacobian(f, x).reshape(x.numel(), -1)
            assert norm[0] == pytest.approx(float(torch.linalg.matrix_norm(J, 2)), rel=1e-6)


def test_a_layer_with_one_branch_has_no_mlp(window: torch.Tensor) -> None:
    model = make_tiny("llama")
    layer: Any = model.model.layers[2]
    layer.mlp = nn.Identity()
    found = sublayer_jacobians(model, window, steps=4)
    assert np.isfinite(found.attention_norm).all()
    assert np.isnan(found.mlp_norm).tolist() == [i == 2 for i in range(LAYERS)]
    assert "above 1 in" in found.headline()


def test_a_missing_forward_derivative_is_named_with_its_remedy(window: torch.Tensor) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * ctx.saved_tensors[0] * grad

    model = make_tiny("llama")
    layer: Any = model.model.layers[1]
    layer.mlp.act_fn.forward = Square.apply
    with pytest.raises(LyapunovPruneError, match="forward-mode"):
        sublayer_jacobians(model, window)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_mixtures_of_experts_run_with_eager_experts(model_type: str, window: torch.Tensor) -> None:
    model = moe(model_type)
    model.set_experts_implementation("eager")
    found = sublayer_jacobians(model, window, steps=4)
    assert (norms(found) > 0).all()


@pytest.mark.parametrize("where", ["mlp.c_proj", "attn.c_attn"])
def test_bad_activations_are_named_by_layer(where: str, window: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    with torch.no_grad():
        model.transformer.h[4].get_submodule(where).weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="output of layer 4"):
        sublayer_jacobians(model, window)


def test_saves_loads_and_prints(llama: PreTrainedModel, window: torch.Tensor, tmp_path: Path) -> None:
    found = sublayer_jacobians(llama, window, steps=3)
    again = JacobianNorms.load(found.save(tmp_path / "jacobian.json"))
    assert str(again) == str(found)
    assert "lower estimates" in str(again)
    assert "stretch of an error" in words_of(jacobian_figure(found))
