"""Images with their classes: the input of measurements of image classifiers, checked, and recognised by hashes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.data.batch import about
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.models.decoder import Model
from lyapunov_prune.models.pictures import image_shape
from lyapunov_prune.results.overlap import Fingerprint
from lyapunov_prune.results.result import MeasuredOn


@dataclass(frozen=True)
class ImageBatch:
    """Images as model input, (images, channels, height, width) float32, and their classes, (images,) int64."""

    pixels: torch.Tensor
    labels: torch.Tensor
    source: str
    split: str

    def __post_init__(self) -> None:
        pixels, labels = self.pixels, self.labels
        fit = pixels.ndim == 4 and pixels.is_floating_point() and len(pixels) > 0
        if not (fit and labels.shape == pixels.shape[:1] and labels.dtype == torch.int64):
            raise LyapunovPruneError(
                f"images are {pixels.dtype} {tuple(pixels.shape)} and labels {labels.dtype} {tuple(labels.shape)}; "
                "give floats (images, channels, height, width) and int64 labels (images,)"
            )
        require_numbers(self.pixels, f"pixels of {self.source}", "give finite pixels")

    def __len__(self) -> int:
        return len(self.pixels)

    def item(self, index: int) -> torch.Tensor:
        """One image, channels × height × width."""
        return self.pixels[index]

    def take(self, indices: Sequence[int]) -> ImageBatch:
        """The images at these indices, in this order."""
        places = torch.tensor(indices, dtype=torch.int64)
        return replace(self, pixels=self.pixels[places], labels=self.labels[places])

    @property
    def text_hash(self) -> str:
        """SHA-256 of the shape, the pixels and the labels."""
        digest = hashlib.sha256(str(tuple(self.pixels.shape)).encode())
        digest.update(self.pixels.to("cpu", torch.float32).contiguous().numpy().tobytes())
        digest.update(self.labels.to("cpu").contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def image_hashes(self) -> np.ndarray:
        """A hash of each image, (images,) uint64, independent of the mean and deviation used for scaling.

        Every channel is stretched to 0 … 255 and rounded. Pixels of 8 bits come back exactly, or stretched alike.
        Adding 10⁻³ keeps halves from being rounded to either side.
        """
        pixels = self.pixels.to("cpu", torch.float64)
        low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
        stretched = (pixels - low) * (255 / (high - low).clamp_min(1e-12)) + 0.5 + 1e-3
        rows = stretched.floor().clamp(0, 255).to(torch.uint8).flatten(1).numpy()
        digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
        return np.frombuffer(digests, dtype="<u8")

    def shared_with(self, seen: MeasuredOn) -> int:
        """Number of these images that `seen` was measured on."""
        if seen.text_hash == self.text_hash:
            return len(self)
        if not seen.images or seen.fingerprint is None:
            return 0
        known = np.frombuffer(base64.b64decode(seen.fingerprint.hashes), dtype="<u8")
        return int(np.isin(self.image_hashes, known).sum())

    def measured_on(self, model: Model, seed: int | None = None) -> MeasuredOn:
        hashes = base64.b64encode(self.image_hashes.tobytes()).decode()
        return MeasuredOn(
            **about(model),
            text=self.source,
            split=self.split,
            text_hash=self.text_hash,
            tokens=len(self),
            context=self.pixels.shape[-1],
            bos=None,
            seed=seed,
            fingerprint=Fingerprint(1, 1, hashes),
            images=True,
        )


def checked_images(model: PreTrainedModel, images: ImageBatch) -> ImageBatch:
    """`images`, if they have the size and classes of the classifier `model`. Raises LyapunovPruneError otherwise."""
    require_size(model, images.source, images.pixels)
    low, high = int(images.labels.min()), int(images.labels.max())
    classes: Any = model.config.num_labels
    if low < 0 or high >= classes:
        raise LyapunovPruneError(
            f"a label of {images.source} is {low if low < 0 else high} and {type(model).__name__} knows {classes} "
            f"classes; give labels 0 to {classes - 1}"
        )
    return images


def require_size(model: PreTrainedModel, source: str, pixels: torch.Tensor) -> None:
    """Raise LyapunovPruneError unless `pixels`, (images, channels, height, width), have the model's size."""
    wanted, given = image_shape(model), tuple(pixels.shape[1:])
    if given != wanted:
        raise LyapunovPruneError(
            f"images of {source} are {_size(given)} and {type(model).__name__} looks at {_size(wanted)} (channels × "
            "height × width); give images of that size"
        )


def _size(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))
