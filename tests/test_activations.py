"""Ranks, kurtosis and sparsity against their definitions in float64, and against matrices that show them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import make_tiny, moe, words_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from experiments import activations
from experiments.activations import (
    ActivationStatistics,
    activation_figure,
    activation_statistics,
    excess_kurtosis,
    spectral_ranks,
)
from lyapunov_prune import LyapunovPruneError, NonFiniteError
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.plain import find_projections

# Of a family the last matrix of its MLP, and those that read its input.
MLPS = {
    "gpt2": ("mlp.c_proj", "mlp.c_fc"),
    "gpt_neox": ("mlp.dense_4h_to_h", "mlp.dense_h_to_4h"),
    "opt": ("fc2", "fc1"),
    "phi3": ("mlp.down_proj", "mlp.gate_up_proj"),
}
Seen = dict[str, tuple[torch.Tensor, torch.Tensor]]


def seen(model: PreTrainedModel, ids: torch.Tensor) -> Seen:
    """Inputs and outputs of every matrix in float64, all windows in one forward: module -> (x, y)."""
    found: Seen = {}
    model = model.double()
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: found.update({name: (args[0].detach(), output.detach())})
        )
        for name in {p.module for p in find_projections(wrap(model)) if p.expert is None}
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


def rank_of(tokens: torch.Tensor) -> float:
    """Roy and Vetterli's, from the singular values of the centred tokens."""
    values = torch.linalg.svdvals(tokens - tokens.mean(0)).square()
    p = values / values.sum()
    return float(torch.special.entr(p).sum().exp())


def expected(x: torch.Tensor, y: torch.Tensor, windows: int) -> list[float]:
    y = y.reshape(windows, -1, y.shape[-1])
    energy = (y - y.mean(1, keepdim=True)).square().sum(-1)
    values = torch.linalg.eigvalsh(torch.cov(y.flatten(0, 1).T))
    x = x.flatten(0, -2)
    small = x.abs() <= 0.01 * x.square().mean(-1, keepdim=True).sqrt()
    return [
        rank_of(y.flatten(0, 1)),
        rank_of(y.flatten(0, 1) / y.flatten(0, 1).norm(dim=-1, keepdim=True)),
        float(values.sum() ** 2 / values.square().sum()),
        float(energy.amax(-1).sum() / energy.sum()),
        float(scipy.stats.kurtosis(x.numpy(), axis=None)),
        float(small.double().mean()),
    ]


def numbers(found: ActivationStatistics) -> np.ndarray:
    return np.array(
        [
            found.effective_rank,
            found.token_rank,
            found.participation_ratio,
            found.peak_share,
            found.kurtosis,
            found.sparsity,
        ]
    ).T


@pytest.mark.parametrize("few", [False, True], ids=["120 tokens", "12 tokens"])
def test_agrees_with_the_definitions_in_float64(family: str, few: bool, ids: torch.Tensor) -> None:
    """Twelve tokens are fewer than any width, so that tokens × tokens matrices are summed."""
    ids = ids[:, :4] if few else ids
    model = make_tiny(family)
    found = activation_statistics(model, ids, batch_size=2)
    reference = seen(model, ids)
    assert set(found.names) == set(reference)
    for name, width, row in zip(found.names, found.width, numbers(found), strict=True):
        x, y = reference[name]
        assert width == y.shape[-1]
        # One entry at the edge of 1 % may fall to either side in float32.
        np.testing.assert_allclose(row, expected(x, y, len(ids)), rtol=1e-4, atol=1.5 / x.numel(), err_msg=name)


def test_a_fused_projection_is_one_matrix_with_its_own_name(ids: torch.Tensor) -> None:
    found = activation_statistics(make_tiny("gpt2"), ids)
    assert found.components[:4] == ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert len(found.names) == 4 * 6
    assert found.layers == tuple(i for i in range(6) for _ in range(4))


@settings(max_examples=50)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
def test_ranks_lie_between_one_and_the_dimension(eigenvalues: list[float]) -> None:
    """Entropies fall with their order: participation (order 2) ≤ effective rank (order 1) ≤ dimension (order 0)."""
    rank, participation = spectral_ranks(np.array(eigenvalues))
    assert 1 - 1e-12 <= participation <= rank * (1 + 1e-12) <= len(eigenvalues) * (1 + 1e-9)
    np.testing.assert_allclose(spectral_ranks(np.array(eigenvalues) * 7.0), (rank, participation))
    equal = spectral_ranks(np.full(len(eigenvalues), eigenvalues[0]))
    np.testing.assert_allclose(equal, len(eigenvalues))


@settings(max_examples=50)
@given(st.lists(st.floats(-10, 10), min_size=4, max_size=50), st.floats(-5, 5))
def test_kurtosis_is_scipys_about_any_point(values: list[float], pivot: float) -> None:
    x = np.array(values)
    if x.std() < 0.1:
        x = x + np.linspace(0, 1, len(x))
    moments = np.array([np.mean((x - pivot) ** k) for k in (1, 2, 3, 4)])
    np.testing.assert_allclose(excess_kurtosis(moments), scipy.stats.kurtosis(x), rtol=1e-5, atol=1e-5)


def test_matrices_that_show_what_is_measured(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[1:] = model.model.layers[1].mlp.up_proj.weight[:1]
        model.model.layers[3].mlp.down_proj.weight.zero_()
        model.model.layers[4].post_attention_layernorm.weight[:16] = 0.0
    frame = activation_statistics(model, ids).to_frame().set_index(["layer", "component"])
    assert frame.effective_rank[1, "mlp.up_proj"] == pytest.approx(1, abs=1e-6)
    assert frame.effective_rank[2, "mlp.up_proj"] > 10
    assert np.isnan(frame.effective_rank[3, "mlp.down_proj"])  # nothing leaves it
    assert np.isnan(frame.peak_share[3, "mlp.down_proj"])
    assert frame.sparsity[4, "mlp.gate_proj"] >= 0.5
    assert frame.sparsity[4, "mlp.gate_proj"] == frame.sparsity[4, "mlp.up_proj"]
    assert frame.sparsity[5, "mlp.gate_proj"] < 0.1


def test_a_sink_token_is_seen_and_can_be_weighed_like_the_others(ids: torch.Tensor) -> None:
    """One token a window with an enormous state: it is the covariance, and says nothing of the others."""
    model = make_tiny("gpt2")
    before = activation_statistics(model, ids).to_frame().set_index(["layer", "component"])

    def sink(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = args[0].clone()
        x[:, 0] *= 1e3
        return (x,)

    model.transformer.h[0].mlp.c_proj.register_forward_pre_hook(sink)
    after = activation_statistics(model, ids).to_frame().set_index(["layer", "component"])
    found = after.loc[0, "mlp.c_proj"]
    assert found.peak_share > 0.97  # a lone token moves the mean of its 40 and reads 39/40
    assert found.effective_rank < 3  # a direction a window
    assert found.token_rank > 10
    assert before.loc[0, "mlp.c_proj"].peak_share < 0.2
    assert found.sparsity < 0.5  # the sink is measured by its own size, and so is every other token


def test_a_large_mean_cancels_no_digits(ids: torch.Tensor) -> None:
    model = make_tiny("gpt2").double()
    with torch.no_grad():
        model.transformer.h[2].ln_2.bias += 1e6
        model.transformer.h[2].mlp.c_fc.bias += 1e6
    found = activation_statistics(model, ids)
    x, y = seen(model, ids)["transformer.h.2.mlp.c_fc"]
    row = numbers(found)[found.names.index("transformer.h.2.mlp.c_fc")]
    np.testing.assert_allclose(row[[0, 1, 2, 3, 4]], expected(x, y, 3)[:5], rtol=1e-6)


def test_neither_batch_size_nor_budget_changes_anything(
    family: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny(family)
    one = activation_statistics(model, ids)
    many = activation_statistics(model, ids, batch_size=3)
    np.testing.assert_allclose(numbers(one), numbers(many), rtol=1e-3, atol=1e-3)
    calls: list[int] = []
    feed = activations._feed
    monkeypatch.setattr(activations, "_feed", lambda m, s, g, i: (calls.append(g[-1].layer), feed(m, s, g, i))[1])
    activation_statistics(model, ids, batch_size=3)
    assert calls == [5]  # one forward for all layers
    monkeypatch.setattr(activations, "_BUDGET", 1)
    apart = activation_statistics(model, ids, batch_size=3)
    assert calls[1:] == [0, 1, 2, 3, 4, 5]  # a forward a layer, each stopped there
    np.testing.assert_array_equal(numbers(many), numbers(apart))


def test_a_planted_fault_in_one_matrix_shows_there_and_nowhere_before(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    right = numbers(activation_statistics(model, ids))
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[0] *= 50
    found = activation_statistics(model, ids)
    guilty = found.names.index("model.layers.3.mlp.down_proj")
    np.testing.assert_array_equal(numbers(found)[:guilty], right[:guilty])
    assert found.effective_rank[guilty] < 0.5 * right[guilty, 0]
    assert numbers(found)[guilty, 4] == right[guilty, 4]  # its input is the same


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_every_expert_is_measured_on_its_own_tokens(model_type: str, ids: torch.Tensor) -> None:
    found = activation_statistics(moe(model_type), ids)
    experts = np.array(["experts." in name for name in found.names])
    assert experts.sum() == 3 * 2 * 4
    assert np.isfinite(numbers(found)).all()


def test_a_matrix_that_no_token_met_is_nan(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    model.model.layers[2].extra = torch.nn.Linear(4, 4)
    found = activation_statistics(model, ids)
    assert np.isnan(numbers(found)[found.names.index("model.layers.2.extra")]).all()


def test_bad_activations_are_named(ids: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    with torch.no_grad():
        model.transformer.h[4].mlp.c_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="output of layer 4"):
        activation_statistics(model, ids)
    with pytest.raises(LyapunovPruneError, match="vocabulary"):
        activation_statistics(make_tiny("gpt2"), ids + 97)


def test_saves_loads_and_prints(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    found = activation_statistics(llama, ids)
    again = ActivationStatistics.load(found.save(tmp_path / "activations.json"))
    assert str(again) == str(found)
    assert "at most 119" in str(again)
    assert again.measured_on == found.measured_on


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_the_builtin_model_has_its_sink(smollm2: Decoder, english: TokenBatch) -> None:
    """From layer 11 on, the first token is what most matrices answer to (definitions.md)."""
    found = activation_statistics(smollm2.model, replace(english, ids=english.ids[:2])).to_frame()
    down = found[found.component == "mlp.down_proj"].set_index("layer")
    assert down.peak_share.idxmax() in (10, 11)
    assert down.peak_share.max() > 0.9
    assert down.token_rank[10:12].max() > 10 * down.effective_rank[10:12].min()
    assert found.sparsity.between(0, 1).all()


@pytest.mark.parametrize("name", ["llama", *MLPS])
def test_the_figure_is_of_the_mlp(name: str, ids: torch.Tensor) -> None:
    texts = words_of(activation_figure(activation_statistics(make_tiny(name), ids[:1])))
    assert {*MLPS.get(name, ("mlp.down_proj", "mlp.gate_proj, mlp.up_proj")), "effective rank of y / width"} <= set(
        texts
    )
    assert not any("attn" in text or "attention" in text for text in texts)
