"""check_written: the matrices of a checkpoint against those of the dense model, by whatever they were made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from helpers import inputs_of, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.bounds import approximation as approx_module
from lyapunov_prune.bounds import check as checks
from lyapunov_prune.bounds.approximation import Approximation, approximation
from lyapunov_prune.bounds.check import check_written
from lyapunov_prune.bounds.report import BoundsReport, RatioDistribution
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.compression.methods.magnitude import Magnitude
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.pruning.removal import remove_layers

METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude", "sparsity": 0.5},
    "2:4": {"method": "wanda", "sparsity": 0.5, "pattern": (2, 4)},
    "svd": {"method": "svd", "rank": 4},
    "sparsegpt": {"method": "sparsegpt", "sparsity": 0.5},
}


@pytest.fixture
def few(ids: torch.Tensor) -> torch.Tensor:
    return ids[:2, :20]


def changed_copy(model: PreTrainedModel, name: str, by: torch.Tensor) -> PreTrainedModel:
    """The model with `by` added to one matrix, output × input."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(p for p in find_projections(wrap(other)) if p.name == name).weight(other).add_(by)
    return other


@pytest.mark.parametrize(("name", "part"), [("jamba", "dt_proj"), ("falcon_mamba", "dt_proj")])
def test_predictions_that_weights_no_one_calls_change_are_seen(name: str, part: str, few: torch.Tensor) -> None:
    dense = make_zoo(name)
    small = copy.deepcopy(dense)
    with torch.no_grad():
        for p in find_projections(wrap(small)):
            if part in p.name:
                p.weight(small).copy_(Magnitude().compress(p.weight(small), 0.9))
        flipped = dense(few, use_cache=False).logits.argmax(-1) != small(few, use_cache=False).logits.argmax(-1)
    decisions = check_written(dense, small, few).decisions
    assert decisions is not None
    assert decisions.changed.tolist() == flipped.flatten().tolist()
    assert flipped.any()
    assert not decisions.violations


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_ratio_is_that_of_a_float64_reference(name: str, few: torch.Tensor) -> None:
    """Inputs by hooks on the compressed model, norms by SVD: least, median, 99 % and largest of every matrix."""
    dense = make_tiny(name)
    small = compress(dense, few, method="wanda", sparsity=0.5).model
    report = check_written(dense, small, few)
    entering, wanted = inputs_of(small, few), []
    for p in find_projections(wrap(dense)):
        E, x = p.weight(dense).double() - p.weight(small).double(), entering[p.module]
        wanted.append((x @ E.T).norm(dim=-1) / (torch.linalg.matrix_norm(E, 2) * x.norm(dim=-1)))
    ratios = torch.stack(wanted).numpy()
    distribution = report.distribution
    assert distribution is not None
    np.testing.assert_allclose(distribution.quantiles, np.quantile(ratios, (0, 0.5, 0.99, 1), axis=-1).T, rtol=2e-4)
    np.testing.assert_allclose(report.ratio[0], ratios.max(-1), rtol=2e-4)
    np.testing.assert_allclose(distribution.overall, np.quantile(ratios, (0, 0.5, 0.99, 1)), rtol=2e-4)
    assert distribution.counts.sum() == report.inputs == ratios.size
    assert abs(distribution.counts[:4].sum() - (ratios < 0.2).sum()) <= 2  # one in float32 lies on the edge
    assert report.passed
    assert report.theorems == ("sparse_activation_bound",)
    assert report.method == "as written"


def test_every_family_is_checked_against_what_was_made_of_it(family: str, few: torch.Tensor) -> None:
    dense = make_tiny(family)
    report = check_written(dense, compress(dense, method="rtn", bits=4).model, few[:1])
    assert report.passed, str(report)
    assert report.checks == len(find_projections(wrap(dense)))
    assert report.inputs == report.checks * 20
    assert (report.attained > 0.9999).all()


@pytest.mark.parametrize("method", METHODS)
def test_no_method_violates_its_bounds(method: str, llama: PreTrainedModel, few: torch.Tensor) -> None:
    report = check_written(llama, compress(llama, few, **METHODS[method]).model, few)
    assert report.passed, str(report)
    assert ((report.ratio > 0) & (report.ratio < 1)).all()
    assert report.settings == ()
    assert len(report.composition) == 6


def aligned(model: PreTrainedModel, ids: torch.Tensor) -> tuple[PreTrainedModel, str]:
    """A model whose first matrix differs by `u xᵀ`, with x what the first token gives it: the bound is attained."""
    first = find_projections(wrap(model))[0]
    x = inputs_of(model, ids)[first.module][0].float()
    u = torch.randn(first.stop - first.start, 1, generator=torch.Generator().manual_seed(3))
    return changed_copy(model, first.name, 0.1 * u @ (x / x.norm()).unsqueeze(0)), first.name


def test_a_bound_that_is_attained_holds(llama: PreTrainedModel, few: torch.Tensor) -> None:
    other, name = aligned(llama, few)
    report = check_written(llama, other, few)
    assert report.passed
    assert report.ratio[0, report.names.index(name)] > 0.9999
    assert report.distribution is not None
    # Nothing was changed elsewhere: no bound above zero, and so no ratio.
    assert np.isnan(report.distribution.quantiles[1:]).all()
    assert report.distribution.counts.sum() == few.numel()
    assert report.alignment is not None
    assert not np.isnan(report.alignment.kappa[1:]).any()


def test_planted_fault_a_norm_one_percent_too_small(
    llama: PreTrainedModel, few: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on the text itself, where it attains the bound, and not on the probe alone."""
    other, name = aligned(llama, few)
    certify = approx_module.certify
    monkeypatch.setattr(approx_module, "certify", lambda W: replace(certify(W), bound=certify(W).bound * 0.99))
    report = check_written(llama, other, few)
    assert {v.check.matrix for v in report.violations} == {name}
    assert few.numel() in {v.check.inputs for v in report.violations}
    assert f"VIOLATION: sparse_activation_bound is VIOLATED by {name}" in str(report)
    assert report.distribution is not None
    assert report.distribution.counts[-1] >= 1


def test_planted_fault_a_wrong_matrix(
    llama: PreTrainedModel, few: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certified for its own, and run with the same matrix of the next layer."""
    small = compress(llama, method="rtn", bits=4).model
    first, second = (
        next(p for p in find_projections(wrap(llama)) if p.layer == layer and p.component == "mlp.up_proj")
        for layer in (0, 1)
    )
    guilty = first.weight(llama).data_ptr()

    def wrong(W: torch.Tensor, W_hat: torch.Tensor, **options: Any) -> Approximation:
        certified = approximation(W, W_hat, **options)
        return replace(certified, weight=second.weight(small)) if W.data_ptr() == guilty else certified

    monkeypatch.setattr(checks, "approximation", wrong)
    report = check_written(llama, small, few)
    assert {v.check.matrix for v in report.violations} == {first.name}


def test_it_is_saved_loaded_and_told(llama: PreTrainedModel, few: torch.Tensor, tmp_path: Path) -> None:
    report = check_written(llama, compress(llama, method="magnitude", sparsity=0.5).model, few)
    again = BoundsReport.load(report.save(tmp_path / "bounds.json"))
    assert str(again) == str(report)
    assert again.compressed == report.compressed
    assert again.distribution is not None
    np.testing.assert_array_equal(again.distribution.counts, report.distribution.counts)  # type: ignore[union-attr]
    assert "42 matrices as LlamaForCausalLM holds them, 1680 inputs of its forward, 0 violations" in report.headline()
    assert list(report.to_frame())[3:7] == ["least", "median", "quantile_99", "worst_ratio"]
    assert "median" in report.summary()


def test_the_models_are_left_alone(few: torch.Tensor) -> None:
    dense = make_tiny("gpt2")
    small = compress(dense, method="rtn", bits=4).model
    before = [p.clone() for model in (dense, small) for p in model.parameters()]
    check_written(dense, small, few)
    after = [p for model in (dense, small) for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def with_parameter(name: str) -> Callable[[], PreTrainedModel]:
    def change() -> PreTrainedModel:
        model = make_tiny("gpt2")
        with torch.no_grad():
            model.get_parameter(name).add_(0.01)
        return model

    return change


def with_epsilon() -> PreTrainedModel:
    """A setting that no parameter and no shape tells, beside a matrix that differs."""
    model = make_tiny("gpt2", layer_norm_epsilon=0.1)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.mul_(0.9)
    return model


def with_nan() -> PreTrainedModel:
    model = make_tiny("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    return model


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "itself": (lambda: make_tiny("gpt2"), "there is nothing to check"),
    "family": (lambda: make_tiny("llama"), "family of llama and the dense one of gpt2"),
    "pruned": (
        lambda: remove_layers(make_tiny("gpt2"), [2]),
        r"5 layers and the dense one 6",
    ),
    "width": (
        lambda: make_tiny("gpt2", hidden_size=48),
        "width of 48 and the dense one of 32",
    ),
    "vocabulary": (lambda: make_tiny("gpt2", vocab_size=99), "vocabulary of 99 and the dense one of 97"),
    "dtype": (lambda: make_tiny("gpt2").double(), r"in float64, and the dense one.*one dtype \(dtype\)"),
    "parameter": (lambda: make_tiny("gpt2", tie_word_embeddings=False), r"lm_head\.weight \(97, 32\).*missing"),
    "bias": (
        with_parameter("transformer.h.3.mlp.c_fc.bias"),
        r"another transformer\.h\.3\.mlp\.c_fc\.bias",
    ),
    "norm": (with_parameter("transformer.h.1.ln_2.weight"), r"another transformer\.h\.1\.ln_2\.weight"),
    "only an embedding": (with_parameter("transformer.wte.weight"), "there is nothing to check"),
    "setting": (with_epsilon, "other logits"),
    "compact": (
        lambda: make_compact(make_tiny("gpt2"), Cuts(attention=(0,))),
        "is compact",
    ),
    "NaN": (with_nan, r"transformer\.h\.1\.mlp\.c_fc\.weight of the compressed model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused(case: str, few: torch.Tensor) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(LyapunovPruneError, match=reason) as error:
        check_written(make_tiny("gpt2"), make(), few)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_embedding_that_differs_is_taken_in_both(name: str, few: torch.Tensor) -> None:
    """A GGUF file rounds it too. What remains are errors of matrices, against a dense model with that embedding."""
    dense = make_tiny(name)
    small, shared = compress(dense, method="rtn", bits=4).model, copy.deepcopy(dense)
    for model in (small, shared):
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.1)
    before = dense.get_input_embeddings().weight.clone()
    found, reference = check_written(dense, small, few), check_written(shared, small, few)
    np.testing.assert_array_equal(found.ratio, reference.ratio)
    assert found.composition == reference.composition
    assert found.passed
    assert len(found.shared) == 1
    assert found.shared[0] in found.headline()
    assert found.measured_on.model.same_as(wrap(dense).identity)
    assert torch.equal(dense.get_input_embeddings().weight, before)


def test_adapters_are_refused(llama: PreTrainedModel, few: torch.Tensor) -> None:
    other = copy.deepcopy(llama)
    other.peft_config = {}
    with pytest.raises(LyapunovPruneError, match="adapters are attached"):
        check_written(llama, other, few)


def test_ratios_of_a_fault_are_counted_at_the_end() -> None:
    distribution = RatioDistribution.of([np.array([0.0, 0.049, 0.05, 0.999]), np.zeros(0), np.array([1.0, 1.5])])
    assert distribution.counts.tolist() == [2, 1, *[0] * 17, 1, 2]
    assert np.isnan(distribution.quantiles[1]).all()
    assert distribution.overall.tolist() == pytest.approx([0, (0.05 + 0.999) / 2, 1.475, 1.5])
