"""Digests of weights: one changed bit is another model, a cast, a tie or another size of block is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import make_tiny
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models import digest
from lyapunov_prune.models.digest import combined, digests_of, tensor_digests, weight_digests
from lyapunov_prune.models.structure import identify
from lyapunov_prune.pruning.plan import PruningPlan

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def flipped(tensor: torch.Tensor, index: int, bit: int) -> torch.Tensor:
    """`tensor` with one bit of one number the other way round."""
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize]
    bits = tensor.clone().view(kind)
    bits.view(-1)[index] ^= torch.tensor(1).bitwise_left_shift(bit).to(kind)
    return bits.view(tensor.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 4097, 70_001])
def test_every_bit_counts(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randn(size, generator=generator).to(dtype)
    own = str(dtype).removeprefix("torch.")
    seen = {tensor_digests(tensor)[own]}
    places = {0, size - 1, *torch.randint(size, (3,), generator=generator).tolist()}
    for index in places:
        for bit in (0, 1, 8 * dtype.itemsize // 2, 8 * dtype.itemsize - 2, 8 * dtype.itemsize - 1):
            seen.add(tensor_digests(flipped(tensor, index, bit))[own])
    assert len(seen) == 1 + 5 * len(places)


@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_do_not_cancel(dtype: torch.dtype) -> None:
    """Of sums modulo a power of two, two flips of the top bit would leave nothing."""
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {str(tensor_digests(tensor))}
    for step in (1, 2, 4, 8):
        signs = torch.ones(4096)
        signs[step - 1 :: step] = -1
        seen.add(str(tensor_digests((tensor * signs).to(dtype))))
    assert len(seen) == 5


def test_numbers_that_change_places_count() -> None:
    tensor = torch.arange(100_000.0)
    for other in (tensor.flip(0), tensor.roll(1), tensor.view(100, 1000).t(), tensor.roll(2 * 4096)):
        assert tensor_digests(other) != tensor_digests(tensor)


def test_the_layout_in_memory_and_the_size_of_a_block_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(300, 301)
    found = tensor_digests(tensor)
    assert tensor_digests(tensor.t().contiguous().t()) == found
    assert tensor_digests(torch.cat([torch.zeros(1), tensor.view(-1)])[1:].view(300, 301)) == found
    monkeypatch.setattr(digest, "_ROWS", 3)
    assert tensor_digests(tensor) == found


def test_a_tensor_of_nothing_has_a_digest() -> None:
    found, of_one = tensor_digests(torch.zeros(0)), tensor_digests(torch.zeros(1))
    assert found == tensor_digests(torch.zeros(0))
    assert found.keys() == of_one.keys()
    assert all(found[dtype] != of_one[dtype] for dtype in found)


@pytest.mark.parametrize("wide", DTYPES[:2])
@pytest.mark.parametrize("narrow", DTYPES)
def test_a_cast_has_the_digest_that_was_foreseen(wide: torch.dtype, narrow: torch.dtype) -> None:
    tensor, name = torch.randn(500).to(wide), str(narrow).removeprefix("torch.")
    if narrow.itemsize <= wide.itemsize:
        assert tensor_digests(tensor.to(narrow))[name] == tensor_digests(tensor)[name]
    assert tensor_digests(tensor.to(narrow)).keys() <= tensor_digests(tensor.to(torch.float64)).keys()


def of(**tensors: torch.Tensor) -> dict[str, str]:
    return combined(digests_of(tensors, tensors.__getitem__))


def test_names_count_and_their_order_does_not() -> None:
    a, b = torch.randn(2, 4, 4)
    assert of(x=a, y=b) == of(y=b, x=a)
    assert of(x=a, y=b) != of(x=b, y=a)
    assert of(x=a, y=b) != of(x=a, z=b)


def test_a_router_that_stays_wide_is_rounded_to_compare_and_only_then() -> None:
    """Parameters kept in float32 inside a bfloat16 model."""
    matrix, router = torch.randn(8, 8), torch.randn(8)
    whole = of(matrix=matrix, router=router, step=torch.tensor(3))
    cast = of(matrix=matrix.bfloat16(), router=router.bfloat16(), step=torch.tensor(3))
    mixed = of(matrix=matrix.bfloat16(), router=router, step=torch.tensor(3))
    assert mixed.keys() == {"bfloat16", "bfloat16+float32"}
    assert mixed["bfloat16"] == cast["bfloat16"] == whole["bfloat16"]
    other = of(matrix=matrix.bfloat16(), router=flipped(router, 3, 0), step=torch.tensor(3))
    assert other["bfloat16"] == mixed["bfloat16"]
    assert other["bfloat16+float32"] != mixed["bfloat16+float32"]
    assert of(matrix=matrix, router=router, step=torch.tensor(4))["float32"] != whole["float32"]


# Of models.


def fresh(model: nn.Module) -> dict[str, str]:
    """What is found without anything remembered."""
    return weight_digests(copy.deepcopy(model))


def changes() -> dict[str, Callable[[Any], None]]:
    def head(model: Any) -> None:
        model.lm_head.weight[7, 3] *= 1.5

    def mlp(model: Any) -> None:
        model.model.layers[2].mlp.down_proj.weight[3, 3] += 1

    def norm(model: Any) -> None:
        model.model.norm.weight[0] += 0.25

    def replaced(model: Any) -> None:
        model.model.layers[1].mlp.up_proj.weight = nn.Parameter(model.model.layers[0].mlp.up_proj.weight.clone())

    def through_data(model: Any) -> None:
        model.model.layers[1].mlp.up_proj.weight.data.mul_(1.01)

    def pruned_through_data(model: Any) -> None:  # as wanda's own code does it
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data[weight.abs() < weight.abs().flatten().kthvalue(weight.numel() // 50).values] = 0

    def sign_through_data(model: Any) -> None:
        model.model.layers[3].self_attn.q_proj.weight.data[5, 7].neg_()

    def swapped_through_data(model: Any) -> None:
        weight = model.model.layers[2].mlp.down_proj.weight
        weight.data[:, :2] = weight.data[:, :2].flip(1)

    def buffer(model: Any) -> None:
        model.model.register_buffer("bias", torch.ones(4))

    return {
        f.__name__: f
        for f in (
            head,
            mlp,
            norm,
            replaced,
            through_data,
            pruned_through_data,
            sign_through_data,
            swapped_through_data,
            buffer,
        )
    }


@pytest.mark.parametrize("what", changes())
def test_a_changed_weight_is_another_model(what: str) -> None:
    """Also the object that was known before."""
    model = make_tiny("llama")
    before = identify(model)
    plan = PruningPlan.given(model, [1])
    assert identify(model) == before
    with torch.no_grad():
        changes()[what](model)
    assert weight_digests(model) == fresh(model)
    assert not identify(model).same_as(before)
    with pytest.raises(LyapunovPruneError, match="this plan is of"):
        plan.require_model(identify(model))


def test_an_unchanged_model_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("gpt2")
    found = weight_digests(model)
    monkeypatch.setattr(digest, "_rounded", pytest.fail)
    assert weight_digests(model) == found


def test_training_makes_another_model() -> None:
    model = make_tiny("llama")
    before = weight_digests(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    assert weight_digests(model) == fresh(model) != before


def test_a_model_made_for_inference_has_digests(llama: PreTrainedModel) -> None:
    with torch.inference_mode():
        model = copy.deepcopy(llama)
        assert weight_digests(model) == weight_digests(llama)
        model.lm_head.weight.mul_(2)
        assert weight_digests(model) != weight_digests(llama)


def test_dtypes_of_which_neither_rounds_to_the_other_cannot_be_compared() -> None:
    plan = PruningPlan.given(make_tiny("llama").half(), [1])
    with pytest.raises(LyapunovPruneError, match=r"bfloat16 .*float16") as raised:
        plan.require_model(identify(make_tiny("llama").bfloat16()))
    assert "\n" not in str(raised.value)
    assert not identify(make_tiny("llama").half()).same_as(identify(make_tiny("gpt2").bfloat16()))
