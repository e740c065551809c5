"""Three disjoint slices of one data set: to learn from, to choose by, and to report."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np

from lyapunov_prune.arguments import Seed, checked
from lyapunov_prune.data.batch import TokenBatch, require_disjoint
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.errors import LyapunovPruneError

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
    parts = _places(np.arange(len(examples)), len(examples))
    if min(map(len, parts)) < _LEAST:
        raise LyapunovPruneError(
            f"{examples.text} gives {len(examples)} windows, too small for three slices of {_LEAST} or more; raise "
            "--tokens, lower --context or give a longer text"
        )
    cut = _cut(examples, parts)
    for one, other in combinations(cut, 2):
        require_disjoint(one, other)
    return Slices(*cut)


def _cut(examples: E, parts: list[np.ndarray]) -> list[E]:
    return [replace(examples.take(part.tolist()), split=name) for name, part in zip(NAMES, parts, strict=True)]


def _places(order: np.ndarray, n: int) -> list[np.ndarray]:
    first, second = round(SHARES[0] * n), round((SHARES[0] + SHARES[1]) * n)
    return [order[:first], order[first:second], order[second:]]


def _of_classes(images: ImageBatch, seed: int) -> list[np.ndarray]:
    """The indices of three slices in random order; copies of an image follow the first of them."""
    generator = np.random.default_rng(seed)
    labels = images.labels.numpy()
    _, first, group = np.unique(images.image_hashes, return_index=True, return_inverse=True)
    parts: list[list[np.ndarray]] = [[], [], []]
    for label in np.unique(labels):
        own = first[labels[first] == label]
        cut = _places(generator.permutation(own), len(own))
        if min(map(len, cut)) < _LEAST:
            raise LyapunovPruneError(
                f"{images.source} holds {len(own)} different images of class {label}, too small for three slices of "
                f"{_LEAST} or more; give more"
            )
        for part, places in zip(parts, cut, strict=True):
            part.append(np.flatnonzero(np.isin(group, group[places])))
    return [generator.permutation(np.concatenate(part)) for part in parts]
