"""Images: what they are refused for, what they are known by, and what is cut out of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from helpers import digits, make_classifier, make_tiny

from lyapunov_prune import LyapunovPruneError, TokenBatch
from lyapunov_prune.data import ImageBatch
from lyapunov_prune.data.examples import as_examples
from lyapunov_prune.models.decoder import wrap_any
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.result import MeasuredOn


def test_an_item_is_one_input_and_a_part_keeps_its_classes() -> None:
    images = digits()
    assert len(images) == 6
    assert torch.equal(images.item(2), images.pixels[2])
    part = images.take([4, 1])
    assert torch.equal(part.pixels, images.pixels[[4, 1]])
    assert part.labels.tolist() == [4, 1]
    assert (part.source, part.split) == ("digits", "all")


def test_a_window_is_an_item_of_text(ids: torch.Tensor) -> None:
    batch = TokenBatch(ids, "text", "all", None)
    assert len(batch) == 3
    assert torch.equal(batch.item(1), ids[1])
    assert torch.equal(batch.take(np.array([2, 0])).ids, ids[[2, 0]])


def test_the_hash_is_of_pixels_and_labels() -> None:
    images = digits()
    moved, turned = images.pixels.clone(), images.labels.flip(0)
    moved[3, 0, 2, 2] += 1e-3
    changed = [dataclasses.replace(images, pixels=moved), dataclasses.replace(images, labels=turned), images.take([0])]
    assert len({images.text_hash, *(other.text_hash for other in changed)}) == 4
    assert digits().text_hash == images.text_hash


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_known_again_however_its_pixels_were_scaled(channels: int) -> None:
    raw = torch.randint(256, (40, channels, 8, 8), generator=torch.Generator().manual_seed(3)).double()
    raw[:20] = (raw[:20] / 2).floor() + 3  # their channels do not reach 0 or 255
    mean, deviation = torch.rand(2, channels, 1, 1, dtype=torch.float64) + 0.2
    labels = torch.zeros(40, dtype=torch.int64)
    scaled = [raw / 255, (raw / 255 - mean) / deviation, raw]
    hashes = [ImageBatch(pixels.float(), labels, "x", "all").image_hashes for pixels in scaled]
    assert np.array_equal(hashes[0], hashes[1])
    assert np.array_equal(hashes[0], hashes[2])
    assert len(set(hashes[0].tolist())) == 40


def test_images_that_were_seen_are_counted_wherever_they_stand() -> None:
    model, images = make_classifier("vit"), digits(20)
    seen = decode(MeasuredOn, encode(images.take(range(5, 15)).measured_on(model)))
    assert images.shared_with(seen) == 10
    assert images.take(range(4, 8)).shared_with(seen) == 3
    assert images.take([0, 1, 19]).shared_with(seen) == 0
    assert digits(20, seed=1).shared_with(seen) == 0
    assert images.take(range(5, 15)).shared_with(seen) == 10


def test_text_and_images_share_nothing(ids: torch.Tensor) -> None:
    batch, images = TokenBatch(ids, "text", "all", None), digits()
    of_text, of_images = batch.measured_on(make_tiny("llama")), images.measured_on(make_classifier("deit"))
    assert images.shared_with(of_text) == batch.shared_with(of_images) == 0


def test_what_was_measured_is_said_in_images() -> None:
    seen = digits().measured_on(make_classifier("vit"))
    assert seen.images
    assert seen.line().startswith("ViTForImageClassification, float32 on cpu; 6 images of digits (all, ")
    assert seen.line().endswith("8 pixels wide")


def test_files_from_before_images_are_of_text(ids: torch.Tensor) -> None:
    old = encode(TokenBatch(ids, "text", "all", None).measured_on(make_tiny("llama")))
    del old["images"]
    assert not decode(MeasuredOn, old).images


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixels": torch.zeros(2, 8, 8)}, r"torch.float32 \(2, 8, 8\)"),
        ({"pixels": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)}, "images are torch.uint8"),
        ({"pixels": torch.zeros(0, 1, 8, 8)}, r"\(0, 1, 8, 8\)"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, r"\(5,\)"),
        ({"labels": torch.zeros(6)}, "labels torch.float32"),
        ({"pixels": torch.full((6, 1, 8, 8), float("nan"))}, "pixels of digits"),
    ],
)
def test_what_are_no_images_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        dataclasses.replace(digits(), **change)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (digits(channels=3), "3 × 8 × 8 .*ViTForImageClassification .*1 × 8 × 8"),
        (digits(size=12), "are 1 × 12 × 12"),
        (dataclasses.replace(digits(), labels=torch.arange(6)), "label of digits is 5"),
        (dataclasses.replace(digits(), labels=-torch.ones(6, dtype=torch.int64)), "label of digits is -1"),
    ],
)
def test_images_that_the_model_cannot_be_given_are_refused(images: ImageBatch, message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        as_examples(wrap_any(make_classifier("vit")), images)


def test_each_kind_of_model_is_given_its_own_kind_of_data(ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match=r"LlamaForCausalLM .*digits"):
        as_examples(wrap_any(make_tiny("llama")), digits())
    with pytest.raises(LyapunovPruneError, match="DeiTForImageClassification reads images"):
        as_examples(wrap_any(make_classifier("deit")), ids)
