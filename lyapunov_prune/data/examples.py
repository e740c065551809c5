"""Examples of either kind, windows of tokens or images, and three disjoint slices of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Seed, checked
from lyapunov_prune.data.batch import TokenBatch, Tokens, checked_batch, require_disjoint
from lyapunov_prune.data.images import ImageBatch, checked_images
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.pictures import looks_at_images

# Both have `len`, `item(i)` (one model input without the batch dimension), `take(indices)`, `text_hash`, `shared_with`
# and `measured_on`.
Examples = TokenBatch | ImageBatch


def as_examples(decoder: Decoder, examples: Examples | Tokens) -> Examples:
    """Checked examples for a model: tokens or their ids for a decoder, images for an image classifier.

    Raises LyapunovPruneError for examples of the other kind, and as `checked_batch` and `checked_images` do.
    """
    model = decoder.model
    if isinstance(examples, ImageBatch) != looks_at_images(model):
        wanted, given = "images" if looks_at_images(model) else "text", "tokens"
        if isinstance(examples, ImageBatch):
            given = f"images ({examples.source})"
        raise LyapunovPruneError(f"{type(model).__name__} reads {wanted} and was given {given}; give {wanted}")
    if isinstance(examples, ImageBatch):
        return checked_images(model, examples)
    return checked_batch(decoder.structure, examples)


def model_inputs(model: PreTrainedModel, examples: Examples, batch_size: int) -> list[torch.Tensor]:
    """Model inputs in batches of `batch_size`, on its device: token ids, or pixels in its dtype."""
    if isinstance(examples, ImageBatch):
        parts = list(examples.pixels.to(model.dtype).split(batch_size))
    else:
        parts = examples.windows(batch_size)
    return [part.to(model.device) for part in parts]


E = TypeVar("E", TokenBatch, ImageBatch)
NAMES = ("learn", "select", "final")
SHARES = (0.6, 0.2, 0.2)
_LEAST = 2  # fewest items per slice and class; one item has no spread


class Slices(NamedTuple):
    """`learn` is for training, `select` for choosing, and `final` is used once, for the reported numbers."""

    learn: TokenBatch | ImageBatch
    select: TokenBatch | ImageBatch
    final: TokenBatch | ImageBatch


@checked
def slices(examples: TokenBatch | ImageBatch, *, seed: Seed = 0) -> Slices:
    """Cut `examples` into 60, 20 and 20 %, each with its own `split`; reproducible by seed.

    Images are shuffled and cut within each class, so that every slice holds all classes in proportion; copies of an
    image stay in one slice. Windows of a text are cut in order, without shuffling, because neighbours share a subject.

    Raises LyapunovPruneError if there are too few items for three slices, or if windows of two slices share tokens
    (`require_disjoint`).
    """
    if isinstance(examples, ImageBatch):
        return Slices(*_cut(examples, _of_classes(examples, seed)))
    what = f"{len(examples)} windows of {examples.text}"
    cut = _cut(examples, _places(np.arange(len(examples)), what))
    for one, other in combinations(cut, 2):
        require_disjoint(one, other)
    return Slices(*cut)


def _cut(examples: E, parts: list[np.ndarray]) -> list[E]:
    return [replace(examples.take(part.tolist()), split=name) for name, part in zip(NAMES, parts, strict=True)]


def _places(order: np.ndarray, what: str) -> list[np.ndarray]:
    """`order` in three parts; raises LyapunovPruneError, which says `what` it orders, if there are too few."""
    ends = [round(share * len(order)) for share in np.cumsum(SHARES)[:-1]]
    parts = np.split(order, ends)
    if min(map(len, parts)) < _LEAST:
        raise LyapunovPruneError(
            f"{what} are too few for three slices of {_LEAST} or more; give more (of a text more --tokens, or a "
            "shorter --context)"
        )
    return parts


def _of_classes(images: ImageBatch, seed: int) -> list[np.ndarray]:
    """The indices of three slices in random order; copies of an image follow the first of them."""
    generator = np.random.default_rng(seed)
    labels = images.labels.numpy()
    _, first, group = np.unique(images.image_hashes, return_index=True, return_inverse=True)
    parts: list[list[np.ndarray]] = [[], [], []]
    for label in np.unique(labels):
        own = first[labels[first] == label]
        what = f"{len(own)} different images of class {label} in {images.source}"
        for part, places in zip(parts, _places(generator.permutation(own), what), strict=True):
            part.append(np.flatnonzero(np.isin(group, group[places])))
    return [generator.permutation(np.concatenate(part)) for part in parts]
