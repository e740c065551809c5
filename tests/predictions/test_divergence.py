"""What a skipped layer does to the prediction, against whole logits in float64 and against the theorems."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, computed, hooks_of, leave, make_tiny, measures_by_definition, other_head
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, NonFiniteError
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.forward.anatomy import Anatomy, find_anatomy
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.forward.prefix import Prefix
from lyapunov_prune.forward.reading import read
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.predictions import SkipDivergence, skip_divergence
from lyapunov_prune.predictions import divergence as module
from lyapunov_prune.predictions import tiles as tiles_module
from lyapunov_prune.predictions.divergence import (
    SublayerDivergence,
    kl_by_window,
    perplexities_and_kl,
    sublayer_divergence,
)
from lyapunov_prune.ranking import rank_by_divergence

TEST_OF_HEAD = 1  # forward of a scorer
MEASURES = ("variance", "kl", "reverse_kl", "flipped", "variance_r")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Several blocks of positions, several tiles of the vocabulary, the last of each smaller."""
    monkeypatch.setattr(tiles_module, "_ROWS", 16)
    monkeypatch.setattr(tiles_module, "_COLUMNS", 40)
    with torch.no_grad():
        yield


def exact(model: PreTrainedModel, ids: torch.Tensor, T: float = 1.0) -> dict[str, np.ndarray]:
    """All of it in float64, from the model's own logits, by the definitions."""
    twin = copy.deepcopy(model).double()
    structure, rows = find_structure(twin), []
    z = twin(ids).logits[:, :-1].numpy()
    for layer in range(structure.num_layers):
        with skipped(structure, (layer,)):
            z2 = twin(ids).logits[:, :-1].numpy()
        rows.append(measures_by_definition(z, z2, T).mean((1, 2)))
    return dict(zip(MEASURES, np.array(rows).T, strict=True))


def assert_agree(found: SkipDivergence, wanted: dict[str, np.ndarray], rtol: float = 1e-4) -> None:
    for name in MEASURES:
        np.testing.assert_allclose(getattr(found, name), wanted[name], rtol=rtol, err_msg=name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "gpt_neox"])
def test_measures_are_the_definitions(name: str, ids: torch.Tensor) -> None:
    model = make_tiny(name)
    found = skip_divergence(model, ids, batch_size=2)
    assert_agree(found, exact(model, ids))
    assert hooks_of(model) == 0
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_windows_of_two_models_have_the_kl_and_the_loss_of_the_definitions(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", 97 * 3)
    one, other = make_tiny("llama", seed=1), make_tiny("llama", seed=2)
    z, z2 = (copy.deepcopy(model).double()(ids).logits[:, :-1] for model in (one, other))
    wanted = measures_by_definition(z.numpy(), z2.numpy(), 1.0)[1].mean(-1)
    risen = [cross_entropy(b, row) - cross_entropy(a, row) for a, b, row in zip(z, z2, ids[:, 1:], strict=True)]
    kl, loss = kl_by_window(read(wrap(one), ids), read(wrap(other), ids))
    np.testing.assert_allclose(kl, wanted, rtol=1e-4)
    np.testing.assert_allclose(loss, risen, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("T", [0.5, 3.0])
def test_the_temperature_is_in_every_measure(T: float, llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = skip_divergence(llama, ids, temperature=T)
    assert_agree(found, exact(llama, ids, T))
    assert found.temperature == T


def test_dividing_the_logits_is_a_temperature(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    warm = skip_divergence(model, ids, temperature=2)
    model.lm_head.weight.div_(2)  # type: ignore[union-attr]
    found = skip_divergence(model, ids)
    assert_agree(found, {name: getattr(warm, name) for name in MEASURES}, rtol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [
        ("gemma2", {"query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}),
        ("granite", {"logits_scaling": 4.0}),
        ("cohere", {"logit_scale": 0.25}),
    ],
)
def test_caps_and_scales_of_the_logits_are_the_models_own(
    model_type: str, extra: dict[str, Any], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = other_head(model_type, **extra)
    wanted, calls = exact(model, ids), computed(model)
    assert not Scorer(wrap(model), ids).blockwise
    calls.clear()
    found = skip_divergence(model, ids)
    assert_agree(found, wanted)
    # The head's forwards run no layer: as many as a walk, whatever the number of chunks.
    assert max(calls.values()) <= (LAYERS + 3) * len(ids) + 2 * LAYERS
    assert not any("forward" in m.__dict__ for m in model.modules())
    # Planted fault: the head's matrix alone.
    monkeypatch.setattr(Scorer, "tiles", Scorer._bare_tiles)
    with pytest.raises(AssertionError):
        assert_agree(skip_divergence(model, ids), wanted)


def test_logits_that_are_no_function_of_the_state_are_refused(ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    model.register_forward_hook(lambda m, args, output: output | {"logits": output.logits + torch.rand(1)})
    scorer = Scorer(wrap(model), ids)
    assert not scorer.blockwise
    with pytest.raises(LyapunovPruneError, match="function of its final state"):
        scorer.logits(torch.zeros(3, 32))


@pytest.mark.parametrize("taken", [True, False], ids=["taken away", "left for ever"])
def test_a_layer_that_needs_more_than_its_state_is_given_it(taken: bool, ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    leave(model, 1, 4, taken=taken)
    twin = make_tiny("llama").double()
    leave(twin, 1, 4, taken=taken)
    found = skip_divergence(model, ids)
    copied = copy.deepcopy
    try:
        copy.deepcopy = lambda x: twin if x is model else copied(x)  # type: ignore[assignment]
        wanted = exact(model, ids)
    finally:
        copy.deepcopy = copied
    assert_agree(found, wanted)


def test_windows_chunks_and_batches_do_not_matter(
    llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = skip_divergence(llama, ids, batch_size=3)
    alone = [skip_divergence(llama, row[None]) for row in ids]
    monkeypatch.setattr(tiles_module, "_ROWS", 1)
    single = skip_divergence(llama, ids)
    for name in MEASURES:
        means = np.mean([getattr(one, name) for one in alone], axis=0)
        np.testing.assert_allclose(getattr(whole, name), means, rtol=1e-5)
        np.testing.assert_allclose(getattr(single, name), means, rtol=1e-5)


def test_a_window_costs_about_half_a_forward_a_layer(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    calls = computed(model)
    Prefix(find_structure(model), ids[:1])
    Scorer(wrap(model), ids[:1])
    before = dict(calls)
    calls.clear()
    skip_divergence(model, ids)
    # Layer k computes after each of the k layers before it is skipped, once where the walk passes or ends.
    assert [calls[k] - before[k] for k in range(LAYERS)] == [len(ids) * (k + 1) for k in range(LAYERS)]


# Small layers.


def quiet(model: Any, layer: int, factor: float) -> Any:
    """`layer` adds `factor` times what it did."""
    block = model.model.layers[layer]
    block.self_attn.o_proj.weight.mul_(factor)
    block.mlp.down_proj.weight.mul_(factor)
    return model


def test_a_layer_that_adds_nothing_has_zero(ids: torch.Tensor) -> None:
    found = skip_divergence(quiet(make_tiny("llama"), 2, 0), ids)
    for name in MEASURES:
        values = getattr(found, name)
        assert values[2] == 0
        assert (np.delete(values, 2) > 0).all()
    assert rank_by_divergence(found).order[0] == rank_by_divergence(found, criterion="cosine").order[0] == 2
    for criterion in ("rho", "oracle"):
        with pytest.raises(LyapunovPruneError, match=f"{criterion} goes by no divergence"):
            rank_by_divergence(found, criterion=criterion)


def test_the_estimate_tends_to_the_divergence(ids: torch.Tensor) -> None:
    """`Var/2` to either KL, with an error of first order: a forgotten factor is no such limit."""
    ratios = []
    for factor in (1e-1, 1e-2, 1e-3, 1e-4):
        found = skip_divergence(quiet(make_tiny("llama").double(), 3, factor), ids)
        ratios.append([found.variance[3] / found.kl[3], found.variance[3] / found.reverse_kl[3]])
    for before, after in pairwise(ratios):
        assert (np.abs(np.array(after) - 1) < 0.3 * np.abs(np.array(before) - 1)).all()
    np.testing.assert_allclose(ratios[-1], 1, atol=1e-4)


def test_float32_keeps_the_digits_of_a_small_divergence(ids: torch.Tensor) -> None:
    model = quiet(make_tiny("llama"), 3, 1e-3)
    found, wanted = skip_divergence(model, ids), exact(model, ids)
    assert wanted["kl"][3] < 1e-5
    for name in ("variance", "kl", "reverse_kl"):
        np.testing.assert_allclose(getattr(found, name), wanted[name], rtol=2e-3)


# What is said of numbers that are none, and of bad input.


def test_a_model_that_is_not_finite_is_refused_and_the_layer_named(ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    model.model.layers[2].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="output of layer 2"):
        skip_divergence(model, ids)
    model = make_tiny("llama")
    model.lm_head.weight.fill_(1e38)
    with pytest.raises(LyapunovPruneError, match="logits of LlamaForCausalLM"):
        skip_divergence(model, ids)


def overflowing(ids: torch.Tensor, least: int = 0) -> PreTrainedModel:
    """A model whose layer 2 gives infinity where it reads `least` tokens or more that differ from its usual input."""
    model: Any = make_tiny("llama")
    usual: list[torch.Tensor] = []
    mlp = model.model.layers[2].mlp
    mlp.register_forward_pre_hook(lambda m, args: usual.append(args[0]))
    model(ids[:1])

    def overflow(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        same = torch.allclose(args[0], usual[0][:, : args[0].shape[1]], atol=1e-4)
        return output if same or args[0].shape[1] < least else output * math.inf

    mlp.register_forward_hook(overflow)
    return model


def test_a_layer_without_which_the_model_overflows_has_no_score(ids: torch.Tensor) -> None:
    found = skip_divergence(overflowing(ids), ids[:1])
    for name in MEASURES:
        values = getattr(found, name)
        assert np.isnan(values[:2]).all()
        assert np.isfinite(values[2:]).all()
    with pytest.raises(LyapunovPruneError, match="number 0"):
        rank_by_divergence(found)


@pytest.mark.parametrize("T", [0.0, -1.0, math.nan, math.inf])
def test_bad_temperatures_are_refused(T: float, llama: PreTrainedModel, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="temperature"):
        skip_divergence(llama, ids, temperature=T)


def test_a_ranking_is_by_the_variance(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = skip_divergence(llama, ids)
    plan = rank_by_divergence(found).plan(2)
    assert plan.criterion == "kl"
    assert set(plan.remove) == set(np.argsort(found.variance)[:2].tolist())
    assert plan.measured_on == (found.measured_on,)


def test_a_bfloat16_model(ids: torch.Tensor) -> None:
    model = make_tiny("llama").bfloat16()
    found, wanted = skip_divergence(model, ids), exact(model, ids)
    np.testing.assert_allclose(found.kl, wanted["kl"], rtol=0.1)


# One branch silenced.

# What a branch adds to the stream, made nothing by hand: the matrices, and their biases, that it ends with.
ENDS = {
    "llama": {"attention": "self_attn.o_proj", "mlp": "mlp.down_proj"},
    "gpt2": {"attention": "attn.c_proj", "mlp": "mlp.c_proj"},
    "gpt_neox": {"attention": "attention.dense", "mlp": "mlp.dense_4h_to_h"},  # parallel branches
}


@pytest.mark.parametrize("what", ["attention", "mlp"])
@pytest.mark.parametrize("name", ENDS)
def test_a_silenced_branch_is_measured_by_the_definitions(name: str, what: str, ids: torch.Tensor) -> None:
    model, T = make_tiny(name), 2.0
    found = sublayer_divergence(model, ids, what, temperature=T, batch_size=2)
    z, rows = copy.deepcopy(model).double()(ids).logits[:, :-1].numpy(), []
    for layer in range(LAYERS):
        twin = copy.deepcopy(model).double()
        for parameter in find_structure(twin).layers[layer].get_submodule(ENDS[name][what]).parameters():
            parameter.zero_()
        z2 = twin(ids).logits[:, :-1].numpy()
        rows.append(measures_by_definition(z, z2, T).mean((1, 2)))
    assert_agree(found, dict(zip(MEASURES, np.array(rows).T, strict=True)))
    assert (hooks_of(model), found.what) == (0, what)
    assert rank_by_divergence(found).what == what


def test_a_layer_without_the_branch_has_no_divergence(
    llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sublayer_divergence(llama, ids, "mlp")

    def without_two(decoder: Decoder, layers: Any) -> dict[int, Anatomy]:
        return find_anatomy(decoder, layers) | {2: Anatomy({}, False, "has none", "")}

    monkeypatch.setattr("lyapunov_prune.forward.reading.find_anatomy", without_two)
    found = sublayer_divergence(llama, ids, "mlp")
    for name in MEASURES:
        wanted = getattr(whole, name).copy()
        wanted[2] = np.nan
        np.testing.assert_array_equal(getattr(found, name), wanted)
    assert 2 not in rank_by_divergence(found).order
    monkeypatch.setattr(
        "lyapunov_prune.forward.reading.find_anatomy", lambda m, layers: {i: Anatomy({}, False, "", "") for i in layers}
    )
    assert np.isnan(sublayer_divergence(llama, ids, "mlp").kl).all()


def test_a_branch_without_which_the_model_overflows_is_not_ranked(ids: torch.Tensor) -> None:
    model = overflowing(ids, least=32)  # few tokens find the branches
    found = sublayer_divergence(model, ids[:1], "attention")
    assert np.isinf(found.kl).tolist() == [True] * 3 + [False] * 3
    with pytest.raises(LyapunovPruneError, match="number 0"):
        rank_by_divergence(found)


def test_only_attention_and_mlp_are_silenced(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="'norms'"):
        sublayer_divergence(llama, ids, "norms")


def test_a_measurement_of_branches_comes_back(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    found = sublayer_divergence(llama, ids, "mlp")
    again = SublayerDivergence.load(found.save(tmp_path / "sublayer-divergence.json"))
    assert (str(again), again.what) == (str(found), "mlp")
    assert "one layer's MLP is silenced, T = 1" in str(found)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_two_models_are_scored_and_compared_in_one_forward_of_each(batch_size: int, ids: torch.Tensor) -> None:
    dense, other = make_tiny("llama"), make_tiny("llama", seed=1)
    p, q = (copy.deepcopy(m).double()(ids).logits[:, :-1].log_softmax(-1) for m in (dense, other))
    wanted = (p.exp() * (p - q)).sum(-1).mean(-1)
    runs = [computed(model) for model in (dense, other)]
    both, kl = perplexities_and_kl(dense, other, ids, batch_size=batch_size)
    assert all(calls[0] == -(-len(ids) // batch_size) + TEST_OF_HEAD for calls in runs)
    assert kl is not None
    np.testing.assert_allclose(kl, wanted.numpy(), rtol=1e-4)
    for found, model, log_p in zip(both, (dense, other), (p, q), strict=True):
        alone = perplexity(model, ids)
        losses = -log_p.gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)
        np.testing.assert_allclose(found.windows, losses.numpy(), rtol=1e-5)
        np.testing.assert_allclose(found.windows, alone.windows, rtol=1e-6)
        assert (found.scored, found.measured_on) == (alone.scored, alone.measured_on)


def test_models_of_different_vocabularies_have_no_kl(ids: torch.Tensor) -> None:
    dense, other = make_tiny("llama"), make_tiny("llama", vocab_size=200)
    some = ids.clamp(max=199)
    both, kl = perplexities_and_kl(dense, other, some)
    assert kl is None
    assert [each.value for each in both] == [perplexity(model, some).value for model in (dense, other)]
