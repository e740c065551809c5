"""Two factors of a matrix of low rank: their product is the matrix within rounding, in every dtype and family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_mixture, make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lyapunov_prune import compress
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.factors import find_factored, require_smaller, rounding_of, two_factors, with_factors
from lyapunov_prune.forward.logits import deviation
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.modeling_compact import LowRank
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.structure import find_layers, identify

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
W = 0.2 * torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


def low_rank(m: int, n: int, rank: int, decades: float, seed: int = 0) -> torch.Tensor:
    """m × n of this rank in float64, its singular values from 1 down to `10^-decades`."""
    generator = torch.Generator().manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(k, rank, dtype=torch.float64, generator=generator))[0] for k in (m, n))
    return (U * torch.logspace(0, -decades, rank, dtype=torch.float64)) @ V.T


def error(W: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor]) -> float:
    L, R = factors
    return float((L.double() @ R.double() - W.double()).norm())


@settings(max_examples=60)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, 3, 8, 14]), st.sampled_from(DTYPES)
)
def test_the_product_is_the_matrix_within_rounding(m: int, n: int, rank: int, decades: int, dtype: torch.dtype) -> None:
    rank = min(m, n, rank)
    W = low_rank(m, n, rank, decades).to(dtype)
    L, R = two_factors(W, rank)
    assert (L.shape, R.shape, L.dtype, R.dtype) == ((m, rank), (rank, n), dtype, dtype)
    assert error(W, (L, R)) <= rounding_of(W, (L, R))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_any_scale_has_factors(scale: float) -> None:
    W = (low_rank(12, 20, 3, 1) * scale).float()
    factors = two_factors(W, 5)  # more than it has
    assert error(W, factors) <= rounding_of(W, factors)
    assert all(bool(factor.isfinite().all()) for factor in factors)


def test_less_rank_is_the_truncated_svd() -> None:
    W = low_rank(24, 17, 17, 2)
    U, s, V = torch.linalg.svd(W, full_matrices=False)
    L, R = two_factors(W, 5)
    torch.testing.assert_close(L @ R, (U[:, :5] * s[:5]) @ V[:5], rtol=0, atol=1e-12)
    torch.testing.assert_close(L.norm(dim=0), R.norm(dim=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_sees_a_lost_direction(dtype: torch.dtype) -> None:
    W = low_rank(24, 30, 6, 0.5).to(dtype)
    L, R = two_factors(W, 6)
    for wrong in ((L[:, :5], R[:5]), (L.flip(1), R), (L, -R), (2 * L, R)):
        assert error(W, wrong) > rounding_of(W, wrong)


# In a model.


def test_every_family_computes_what_the_dense_one_does(family: str, ids: torch.Tensor) -> None:
    dense = compress(make_tiny(family), method="svd", sparsity=0.4)
    before = identify(dense.model)
    small = with_factors(dense.model, dense.report.ranks)
    with torch.no_grad():
        assert deviation(small(ids).logits, dense.model(ids).logits) < 1e-4
    assert identify(dense.model) == before
    assert {type(small.get_submodule(each.module)) for each in find_factored(dense.model, dense.report.ranks)} == {
        LowRank
    }
    gone = sum(each.gone for each in find_factored(dense.model, dense.report.ranks))
    assert dense.model.num_parameters() - small.num_parameters() == gone > 0


def test_what_is_not_replaced_is_shared(llama: PreTrainedModel) -> None:
    dense = compress(llama, method="svd", sparsity=0.4)
    small = with_factors(dense.model, dense.report.ranks)
    theirs = dict(dense.model.named_parameters())
    kept = [name for name, _ in small.named_parameters() if name in theirs]
    assert "model.embed_tokens.weight" in kept
    assert all(p.data_ptr() == theirs[name].data_ptr() for name, p in small.named_parameters() if name in kept)
    assert not [name for name in kept if "proj" in name]


def test_a_fused_matrix_comes_apart_with_a_rank_for_each_run() -> None:
    model = make_tiny("phi3")
    names = [p.name for p in find_projections(wrap(model)) if p.module.endswith("layers.2.self_attn.qkv_proj")]
    ranks: dict[str, int | None] = dict.fromkeys(p.name for p in find_projections(wrap(model)))
    ranks |= dict(zip(names, (3, 2, 1), strict=True))
    (each,) = find_factored(model, ranks)
    assert each.form == "low-rank 32:3 16:2 16:1"
    assert each.numbers == 3 * (32 + 32) + 2 * (16 + 32) + 1 * (16 + 32)
    assert each.gone == 64 * 32 - each.numbers
    module: Any = with_factors(model, ranks).get_submodule(each.module)
    W = model.get_submodule(each.module).weight.detach()
    runs = zip(module.left, module.right.weight.split([3, 2, 1]), W.split([32, 16, 16]), (3, 2, 1), strict=True)
    for left, R, rows, r in runs:
        U, s, V = torch.linalg.svd(rows.double(), full_matrices=False)
        torch.testing.assert_close(left.weight.double() @ R.double(), (U[:, :r] * s[:r]) @ V[:r], rtol=0, atol=1e-5)


def test_what_is_not_smaller_stays_dense(llama: PreTrainedModel) -> None:
    ranks = {
        p.name: 13 for p in find_projections(wrap(llama))
    }  # of 16 × 32: at most 10; of 32 × 32: 15; of 48 × 32: 19
    names = {each.module.rpartition(".")[2] for each in find_factored(llama, ranks)}
    assert names == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    with pytest.raises(LyapunovPruneError, match="two factors"):
        require_smaller(llama, 20)
    require_smaller(llama)


# A compact model before or after.


def test_factors_of_a_compact_model_and_cuts_of_factors(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    cut = make_compact(llama, Cuts(attention=(0,), merged={1: (W, None)}))
    dense = compress(cut, method="svd", sparsity=0.4)
    small = with_factors(dense.model, dense.report.ranks)
    with torch.no_grad():
        assert deviation(small(ids).logits, dense.model(ids).logits) < 1e-4
    layers = find_layers(small).layers
    assert small.config.cuts[0]["self_attn"] == "none"
    assert small.config.cuts[1]["mlp"] == "linear low-rank 32:9"
    again = make_compact(small, Cuts(attention=(2,), merged={3: (W, None)}, remove=(4,)))
    assert again.config.cuts[2] == {
        "self_attn": "none",
        "input_layernorm": "identity",
        **{f"mlp.{name}": f"low-rank {form}" for name, form in small_forms(small, 2).items()},
    }
    assert {path: form for path, form in again.config.cuts[3].items() if "mlp" in path} == {"mlp": "linear"}
    assert find_layers(again).num_layers == len(layers) - 1


def small_forms(small: PreTrainedModel, layer: int) -> dict[str, str]:
    places = small.config.cuts[layer]
    return {
        path.removeprefix("mlp."): form.removeprefix("low-rank ") for path, form in places.items() if "mlp." in path
    }


def test_factors_are_cut_once_more(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    first = compress(llama, method="svd", sparsity=0.2)
    small = with_factors(first.model, first.report.ranks)
    second = compress(small, method="svd", sparsity=0.2)
    smaller = with_factors(second.model, second.report.ranks)
    assert smaller.num_parameters() < small.num_parameters()
    with torch.no_grad():
        assert deviation(smaller(ids).logits, second.model(ids).logits) < 1e-4


@pytest.mark.parametrize("runs", ["", "32", "31:4", "32:x", "16:4", "32:33", "32:0"])
def test_a_form_that_is_not_of_the_matrix_is_refused(runs: str, llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError):
        LowRank.of(f"low-rank {runs}", llama.get_submodule("model.layers.0.self_attn.q_proj"))


def test_experts_of_one_tensor_stay_dense() -> None:
    model = make_mixture("mixtral")
    ranks = {p.name: 2 for p in find_projections(wrap(model))}
    factored = find_factored(model, ranks)
    assert {each.module.rpartition(".")[2] for each in factored} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    made = with_factors(model, ranks)
    assert torch.equal(made.model.layers[0].mlp.experts.down_proj, model.model.layers[0].mlp.experts.down_proj)
