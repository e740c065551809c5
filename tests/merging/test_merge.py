"""Merged feed-forward blocks: against the unmerged block, against numpy, by property; what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import IMAGE_MODELS, TINY, computed, digits, hooks_of, make_classifier, make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.calibration.blocks import sum_blocks
from lyapunov_prune.data import ImageBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.merging.merge import Merged, merge_blocks, merge_layers, merge_rounding, product
from lyapunov_prune.merging.reduction import HiddenMap
from lyapunov_prune.merging.reductions.affine import RIDGE, least_squares
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.models.feedforward import FeedForward, find_feedforward
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import find_layers, find_structure
from lyapunov_prune.pruning.removal import merged_check

PLAIN = ("gpt2", "gpt_neox", "opt", "vit", "deit")
GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
PAIRS = [(n, r) for n in PLAIN for r, known in REDUCTIONS.items() if "plain" in known.blocks]
PAIRS += [(n, r) for n in GATED for r, known in REDUCTIONS.items() if "gated" in known.blocks]
EVERY = pytest.mark.parametrize(("name", "reduction"), PAIRS)
DEFINED = ("identity", "mean-gate", "scaled", "affine")  # by `reference`
LAYER = 2


class Subject:
    """A model with its inputs, a decoder or an image model, and one of its blocks."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float64) -> None:
        self.name = name
        generator = torch.Generator().manual_seed(5)
        if name in IMAGE_MODELS:
            self.model = make_classifier(name).to(dtype)
            self.inputs = {"pixel_values": torch.randn(9, 1, 8, 8, generator=generator).to(dtype)}
        else:
            self.model = make_tiny(name).to(dtype)
            self.inputs = {"input_ids": torch.randint(3, 97, (5, 17), generator=generator)}
        self.block = self.read()

    def layers(self, model: PreTrainedModel | None = None) -> nn.ModuleList:
        model = model or self.model
        return getattr(model, self.name).layers if self.name in IMAGE_MODELS else find_structure(model).layers

    def read(self) -> FeedForward:
        return find_feedforward(find_layers(self.model), LAYER)

    def run(self) -> None:
        for i in range(0, len(next(iter(self.inputs.values()))), 2):
            self.model(**{name: x[i : i + 2] for name, x in self.inputs.items()})

    def merge(self, reduction: str) -> Merged:
        (merged,) = merge_blocks(self.layers(), [self.block], reduction, self.run)
        return merged

    def logits(self, model: PreTrainedModel | None = None) -> torch.Tensor:
        with torch.no_grad():
            return (model or self.model)(**self.inputs).logits

    def placed(self, merged: Merged, layer: int = LAYER) -> PreTrainedModel:
        return make_compact(self.model, Cuts(merged={layer: (merged.weight, merged.bias)}))

    def seen(self) -> dict[str, np.ndarray]:
        """What goes through the block in one whole forward, tokens × width: by hooks of this test's own."""
        layer, found = self.layers()[LAYER], {}

        def note(key: str, given: bool) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
                tensor = args[0] if given else output
                found[key] = tensor.detach().double().reshape(-1, tensor.shape[-1]).numpy()

            return hook

        up, out = layer.get_submodule(self.block.up.module), layer.get_submodule(self.block.out.module)
        handles = [
            up.register_forward_hook(note("x", True)),
            up.register_forward_hook(note("u", False)),
            layer.get_submodule(self.block.activation).register_forward_hook(note("g", False)),
            out.register_forward_hook(note("h", True)),
            out.register_forward_hook(note("y", False)),
        ]
        self.logits()
        for handle in handles:
            handle.remove()
        found["u"] = found["u"][:, self.block.up.start : self.block.up.stop]
        return found


def constants(subject: Subject, reduction: str) -> np.ndarray:
    """`c` of the reductions of a gate, by definition."""
    seen = subject.seen()
    g, u = seen["g"], seen["u"]
    return g.mean(0) if reduction == "mean-gate" else (g * u**2).mean(0) / (u**2).mean(0)


@contextmanager
def unmerged(subject: Subject, reduction: str, merged: Merged) -> Iterator[None]:
    """The model with its activation replaced, both matrices in their places.

    `affine`, and what `constants` does not know, replaces the hidden vector.
    """
    layer, dtype = subject.layers()[LAYER], subject.model.dtype
    activation = layer.get_submodule(subject.block.activation)
    up, out = layer.get_submodule(subject.block.up.module), layer.get_submodule(subject.block.out.module)
    if reduction == "identity":
        with hooked(after=[(activation, lambda module, args, kwargs, output: args[0])]):
            yield
    elif reduction not in ("mean-gate", "scaled"):
        given: list[torch.Tensor] = []
        T, t = merged.tau.weight.to(dtype), None if merged.tau.bias is None else merged.tau.bias.to(dtype)
        with hooked(
            before=[
                (up, lambda module, args, kwargs: given.append(args[0])),
                (out, lambda module, args, kwargs: ((nn.functional.linear(given.pop(), T, t),), kwargs)),
            ]
        ):
            yield
    else:
        c = torch.from_numpy(constants(subject, reduction)).to(dtype)
        with hooked(after=[(activation, lambda module, args, kwargs, output: c.expand_as(output))]):
            yield


def holds(subject: Subject, merged: Merged, layer: int = LAYER) -> bool:
    """Whether the gate takes the merged matrix for the block of this layer."""
    out = subject.block.parts(subject.layers()[layer]).out
    return merged_check([(layer, out, merged.tau, (merged.weight, merged.bias))], "a merge").passed


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_every_plain_family_and_both_image_models_are_here() -> None:
    assert {*PLAIN, *GATED} == {*TINY, *IMAGE_MODELS} - {"gpt2-inverse-layer"}
    assert {r for _, r in PAIRS} == set(REDUCTIONS) >= set(DEFINED)


@EVERY
def test_merged_equals_unmerged_in_float64(name: str, reduction: str) -> None:
    subject = Subject(name)
    merged = subject.merge(reduction)
    small = subject.placed(merged)
    with unmerged(subject, reduction, merged):
        reference = subject.logits()
    assert distance(subject.logits(small), reference) < 1e-12
    assert distance(subject.logits(), reference) > 1e-3  # and it does something
    # Smaller by exactly what was removed.
    counts = [sum(p.numel() for p in m.parameters()) for m in (subject.model, small)]
    assert counts[0] - counts[1] == merged.before - merged.after > 0
    assert hooks_of(subject.model) == 0


@EVERY
def test_merged_equals_unmerged_within_rounding_in_float32(name: str, reduction: str) -> None:
    """The output of the block on the very inputs that it is given, with the margin that `merge_rounding` states."""
    subject = Subject(name, torch.float32)
    merged = subject.merge(reduction)
    assert merged.weight.dtype == torch.float32
    with unmerged(subject, reduction, merged):
        seen = subject.seen()
    x = torch.from_numpy(seen["x"]).float()
    own = nn.functional.linear(x, merged.weight, merged.bias).double().numpy()
    size = np.linalg.norm(seen["x"], axis=-1)
    out = subject.block.parts(subject.layers()[LAYER]).out
    margin = merge_rounding(out, merged.tau, (merged.weight, merged.bias), size, 0 * size, unit=2.0**-24)
    error = np.linalg.norm(own - seen["y"], axis=-1)
    assert (error <= margin).all()
    assert (margin < 0.02 * np.linalg.norm(seen["y"], axis=-1)).mean() > 0.9  # the margin leaves no room for a fault
    assert error.max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "reduction"), [("llama", "scaled"), ("phi3", "affine"), ("opt", "identity")])
def test_the_product_is_rounded_once_to_a_narrow_dtype(name: str, reduction: str, dtype: torch.dtype) -> None:
    subject = Subject(name, dtype)
    merged = subject.merge(reduction)
    out = subject.block.parts(subject.layers()[LAYER]).out
    W = out[0].double() @ merged.tau.weight
    assert merged.weight.dtype == dtype
    assert torch.equal(merged.weight, W.to(dtype))
    assert subject.logits(subject.placed(merged)).isfinite().all()


# Each reduction against numpy.


def reference(subject: Subject, reduction: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """W, b and the hidden vectors τ(x) of all tokens, from the definitions."""
    layer, block = subject.layers()[LAYER], subject.block
    seen = subject.seen()
    x, h = seen["x"], seen["h"]

    def pair(p: Any) -> tuple[np.ndarray, np.ndarray]:
        W, b = p.weight(layer).double().numpy(), p.bias(layer)
        return W, np.zeros(len(W)) if b is None else b.double().numpy()

    (Wu, bu), (Wd, bd) = pair(block.up), pair(block.out)
    if reduction == "affine":
        # The output, not the hidden vector: rows √λ I for the ridge, after taking the means out.
        y = h @ Wd.T + bd
        X, Y = x - x.mean(0), y - y.mean(0)
        ridge = np.sqrt(RIDGE * (X**2).sum(0).mean())
        A = np.vstack([X, ridge * np.eye(X.shape[1])])
        W = np.linalg.lstsq(A, np.vstack([Y, np.zeros((X.shape[1], Y.shape[1]))]), rcond=None)[0].T
        H = np.linalg.lstsq(A, np.vstack([h - h.mean(0), np.zeros((X.shape[1], h.shape[1]))]), rcond=None)[0].T
        return W, y.mean(0) - W @ x.mean(0), h.mean(0) + X @ H.T
    c = np.ones(len(Wu)) if reduction == "identity" else constants(subject, reduction)
    return Wd @ np.diag(c) @ Wu, Wd @ (c * bu) + bd, c * (x @ Wu.T + bu)


@pytest.mark.parametrize(("name", "reduction"), [(n, r) for n, r in PAIRS if r in DEFINED])
def test_each_reduction_is_its_definition(name: str, reduction: str) -> None:
    subject = Subject(name)
    merged = subject.merge(reduction)
    W, b, tau = reference(subject, reduction)
    scale = np.abs(W).max()
    np.testing.assert_allclose(merged.weight.numpy(), W, atol=1e-9 * scale)
    np.testing.assert_allclose(0 if merged.bias is None else merged.bias.numpy(), b, atol=1e-9 * scale)
    np.testing.assert_allclose(merged.tau(torch.from_numpy(subject.seen()["x"])).numpy(), tau, rtol=1e-7, atol=1e-9)
    assert (merged.bias is None) == (
        name in GATED and reduction != "affine" and not subject.block.up.bias(subject.layers()[LAYER])
    )


@pytest.mark.parametrize("name", GATED)
def test_a_closer_reduction_errs_less(name: str) -> None:
    subject = Subject(name)
    x, h, y = (torch.from_numpy(subject.seen()[name]) for name in "xhy")
    mean, scaled, affine = (subject.merge(r) for r in ("mean-gate", "scaled", "affine"))

    def error(merged: Merged) -> float:
        return float((y - nn.functional.linear(x, merged.weight, merged.bias)).square().sum())

    # Unit by unit `scaled` is the least-squares choice of c, and affine that of the whole output.
    assert (h - scaled.tau(x)).square().sum() < (h - mean.tau(x)).square().sum()
    assert error(affine) < min(error(mean), error(scaled))


def test_a_block_that_is_affine_already_is_left_exactly() -> None:
    subject = Subject("opt")
    subject.model.model.decoder.layers[LAYER].fc1.bias.data.fill_(1e3)  # every ReLU is open
    merged = subject.merge("identity")
    with unmerged(subject, "identity", merged):
        reference = subject.logits()
    assert distance(subject.logits(), reference) < 1e-6
    # A fit but for its ridge, with which it is the smaller the larger that is.
    (sums,) = sum_blocks(subject.layers(), [subject.block], REDUCTIONS["affine"].needs, subject.run)
    seen = subject.seen()
    x, h = torch.tensor(seen["x"]), torch.tensor(seen["h"])
    errors = [float((h - least_squares(sums, ridge)(x)).square().sum()) for ridge in (1e-9, 1e-3, 0.1)]
    assert errors == sorted(errors)
    assert errors[0] < 1e-9 * float(h.square().sum())


def test_the_forwards_are_the_same_in_one_batch_or_many() -> None:
    model = make_tiny("llama").double()
    ids = torch.randint(3, 97, (5, 17), generator=torch.Generator().manual_seed(5))
    (one,) = merge_layers(model, ids, [3], "affine")
    (all_at_once,) = merge_layers(model, ids, [3], "affine", batch_size=5)
    torch.testing.assert_close(one.weight, all_at_once.weight, rtol=1e-9, atol=1e-12)


def test_no_layer_after_the_last_that_is_merged_computes() -> None:
    model = make_tiny("llama")
    calls = computed(model)
    merge_layers(model, torch.arange(24).view(2, 12), (3, 1), "scaled", batch_size=2)
    assert {layer for layer, n in calls.items() if n} == {0, 1, 2, 3}


def test_several_layers_are_merged_as_one_by_one_and_the_model_is_not_changed() -> None:
    model = make_tiny("phi3").train()
    before = copy.deepcopy(model.state_dict())
    ids = torch.randint(3, 97, (5, 17), generator=torch.Generator().manual_seed(5))
    several = merge_layers(model, ids, (4, 1), "scaled")
    assert [m.block.layer for m in several] == [4, 1]
    for m in several:
        (alone,) = merge_layers(model, ids, [m.block.layer], "scaled")
        assert torch.equal(alone.weight, m.weight)
    assert model.training
    assert hooks_of(model) == 0
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


# The product, by property.

matrices = st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**32 - 1))


@settings(max_examples=60)
@given(matrices, st.booleans(), st.booleans())
def test_the_product_of_two_affine_maps(sizes: tuple[int, int, int, int], first: bool, last: bool) -> None:
    m, hidden, d, seed = sizes
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    out = (rand(m, hidden), rand(m) if last else None)
    tau = HiddenMap(rand(hidden, d), rand(hidden) if first else None)
    W, b = product(out, tau)
    assert (b is None) == (not first and not last)
    x = rand(9, d)
    two = nn.functional.linear(tau(x), *out)
    one = nn.functional.linear(x, W, b)
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    size = torch.linalg.vector_norm(x, dim=-1).numpy()
    error = torch.linalg.vector_norm(one - two, dim=-1).numpy()
    assert (error <= merge_rounding(out, tau, (W, b), size, 0 * size)).all()
    # Linear in each factor, and exact where there is nothing to round.
    torch.testing.assert_close(product((2 * out[0], None), HiddenMap(tau.weight, None))[0], 2 * W, rtol=0, atol=0)
    np.testing.assert_array_equal(product((torch.eye(hidden).double(), None), tau)[0], tau.weight)
    if first:
        assert tau.bias is not None
        expected = out[0] @ tau.bias + (out[1] if out[1] is not None else 0)
        torch.testing.assert_close(b, expected, rtol=1e-12, atol=1e-12)


# Planted faults: each is seen by the comparison, and those of a stored merge by its checks.


@pytest.mark.parametrize(("name", "reduction"), [("gpt2", "identity"), ("vit", "affine"), ("llama", "affine")])
def test_planted_faults_in_a_merge_are_seen(name: str, reduction: str) -> None:
    subject = Subject(name)  # its merged matrix is square: transposed it fits without a word
    merged = subject.merge(reduction)
    assert merged.bias is not None
    with unmerged(subject, reduction, merged):
        truth = subject.logits()
    out = subject.block.parts(subject.layers()[LAYER]).out
    faults = {
        "a transposed product": replace(merged, weight=merged.weight.T.contiguous()),
        "a transposed factor": replace(merged, weight=(out[0] @ merged.tau.weight.T.reshape(merged.tau.weight.shape))),
        "a lost bias": replace(merged, bias=None),
        "a lost part of the bias": replace(merged, bias=torch.zeros_like(merged.bias) if out[1] is None else out[1]),
    }
    assert distance(subject.logits(subject.placed(merged)), truth) < 1e-12
    assert holds(subject, merged)
    for fault, broken in faults.items():
        assert distance(subject.logits(subject.placed(broken)), truth) > 1e-6, fault
        assert not holds(subject, broken), fault


@pytest.mark.parametrize(("name", "reduction"), [("opt", "identity"), ("deit", "affine"), ("qwen3", "scaled")])
def test_planted_fault_a_merge_of_the_wrong_layer_is_seen(name: str, reduction: str) -> None:
    subject = Subject(name)
    merged = subject.merge(reduction)
    with unmerged(subject, reduction, merged):
        truth = subject.logits()
    assert distance(subject.logits(subject.placed(merged, layer=LAYER + 1)), truth) > 1e-6
    assert not holds(subject, merged, layer=LAYER + 1)


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_blocks_of_a_classifier_merge_on_images(name: str, batch_size: int) -> None:
    subject, labels = Subject(name), torch.zeros(9, dtype=torch.int64)
    images = ImageBatch(subject.inputs["pixel_values"], labels, "noise", "learn")
    two, one = merge_layers(subject.model, images, [0, LAYER], "affine", batch_size=batch_size)
    expected = subject.merge("affine")
    assert (two.block.layer, one.block.layer) == (0, LAYER)
    torch.testing.assert_close(one.weight, expected.weight, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(one.bias, expected.bias, rtol=1e-5, atol=1e-8)
    assert hooks_of(subject.model) == 0


def test_images_merge_no_decoder_and_text_no_classifier(ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match=r"LlamaForCausalLM .*digits"):
        merge_layers(make_tiny("llama"), digits(), [1], "scaled")
    with pytest.raises(LyapunovPruneError, match="ViTForImageClassification reads images"):
        merge_layers(make_classifier("vit"), ids, [1], "affine")


# What is refused.


def test_reductions_are_for_their_blocks() -> None:
    ids = torch.arange(24).view(2, 12)
    with pytest.raises(
        LyapunovPruneError,
        match=r"identity .*layer 1 .*gated",
    ):
        merge_layers(make_tiny("llama"), ids, [1], "identity")
    with pytest.raises(LyapunovPruneError, match=r"scaled .*plain"):
        merge_layers(make_tiny("opt"), ids, [1], "scaled")
    with pytest.raises(LyapunovPruneError, match="unknown reduction 'mean'"):
        merge_layers(make_tiny("opt"), ids, [1], "mean")


def test_a_merge_that_is_not_smaller_is_refused_with_its_numbers() -> None:
    ids = torch.arange(24).view(2, 12)
    model = make_tiny("opt", ffn_dim=15)
    with pytest.raises(LyapunovPruneError, match=r"1,056 .*1,007"):
        merge_layers(model, ids, [1], "identity")
    (just,) = merge_layers(make_tiny("opt", ffn_dim=16), ids, [1], "identity")
    assert (just.before, just.after) == (1072, 1056)


def test_too_few_tokens_for_a_fit() -> None:
    model, ids = make_tiny("llama"), torch.arange(32).view(2, 16)
    with pytest.raises(LyapunovPruneError, match=r"32 tokens .*32 inputs.*32"):
        merge_layers(model, ids, [1], "affine")
    merge_layers(model, torch.arange(34).view(2, 17), [1], "affine")
    merge_layers(model, ids, [1], "mean-gate")


def test_layers_that_are_not_there() -> None:
    for layers in ([6], [-1], [1, 1], []):
        with pytest.raises(LyapunovPruneError, match=r"layers"):
            merge_layers(make_tiny("llama"), torch.arange(24).view(2, 12), layers, "scaled")


def test_inputs_that_never_come() -> None:
    subject = Subject("vit")
    with pytest.raises(LyapunovPruneError, match="layer 2 took no part"):
        merge_blocks(subject.layers(), [subject.block], "affine", lambda: None)


def test_weights_and_activations_that_are_not_finite() -> None:
    ids = torch.arange(24).view(2, 12)
    model = make_tiny("llama")
    block = find_feedforward(find_structure(model), 1)
    model.model.embed_tokens.weight.data[5] = torch.nan
    with pytest.raises(LyapunovPruneError, match=r"NaN .*block of layer 1"):
        merge_blocks(model.model.layers, [block], "scaled", lambda: model(ids))
    assert hooks_of(model) == 0
    model = make_tiny("opt").half()
    layer = model.model.decoder.layers[1]
    for matrix in (layer.fc1, layer.fc2):
        matrix.weight.data.fill_(300)
    layer.fc1.bias.data.fill_(-3e4)  # no unit is ever open, so that the block itself is finite
    with pytest.raises(LyapunovPruneError, match=r"NaN.*layer 1.*torch.float16"):
        merge_layers(model, ids, [1], "identity")


def test_a_unit_that_is_never_used_counts_nothing() -> None:
    subject = Subject("llama")
    subject.layers()[LAYER].mlp.up_proj.weight.data[7] = 0
    merged = subject.merge("scaled")
    assert merged.weight.isfinite().all()
    assert not merged.tau.weight[7].any()
