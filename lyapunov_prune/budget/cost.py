"""What every matrix takes and costs in every type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.fisher import fisher, matrices_of
from lyapunov_prune.budget.storage import Storage
from lyapunov_prune.forward.reading import Reading

T = TypeVar("T")
_AT_ONCE = 2**20  # numbers rounded at once
_SAMPLED = 2**17  # numbers of a matrix that are rounded for its costs
_FLOOR = 1e-6  # of the mean importance: a block whose columns all have none would have no scale


@dataclass(frozen=True, eq=False)
class TensorCost:
    """A matrix in each of `kinds`, types of a `Storage`: `bytes` (K,) and `cost` (K,), nats a token.

    `importance` (columns,), or (experts × columns) of the experts that a tensor holds, rounds it. Those with the same
    `together` get the same type.
    """

    name: str
    kinds: tuple[Any, ...]
    bytes: np.ndarray
    cost: np.ndarray
    importance: np.ndarray
    together: str | None = None


def costs(
    reading: Reading,
    storage: Storage = BLOCKS,
    *,
    bits: float = 0.0,
    seed: int = 0,
    importance: Mapping[str, np.ndarray] | None = None,
    folder: Path | None = None,
) -> Iterator[TensorCost]:
    """The cost of every matrix of a model, `c(q) = ½ Σ_ij F_ij (Q_q(W)_ij − W_ij)²`, in the types of the storage.

    `F` is the diagonal of the Fisher information on the batch (`fisher`), and `c` the second-order estimate of the KL
    a token that rounding this matrix causes. Columns are weighted by `importance` where it has the matrix, else by
    `Σ_i F_ij`; experts in one tensor each have importances of their own, and their costs are added. Costs are summed in
    float64, one matrix in memory beside the model and the sums of `fisher`; of a large matrix over the rows of
    `_sample`. Those with one type alone come first. The states of a streamed model are in `folder` if memory is short.
    """
    matrices = matrices_of(reading.model)
    kinds = {name: tuple(storage.kinds_for(name, p.shape[-1], bits)) for name, p in matrices.items()}
    sizes = {name: np.array([storage.size_in(k, p.shape) for k in kinds[name]]) for name, p in matrices.items()}
    for name in [name for name in matrices if len(kinds[name]) == 1]:
        columns = np.ones(matrices[name].shape[-1], np.float32)
        yield TensorCost(name, kinds[name], sizes[name], np.zeros(1), columns)
    several = {name: p for name, p in matrices.items() if len(kinds[name]) > 1}
    for name, found in fisher(reading, several, seed, folder):
        W = reading.model.get_parameter(name).detach().float().cpu().numpy()
        F = found.cpu().numpy()
        given = (importance or {}).get(name)
        columns = _scaled(F.sum(-2, dtype=np.float64) if given is None else np.asarray(given, np.float64))
        each = zip(by_expert(W), by_expert(F), np.atleast_2d(columns), strict=True)
        most = max(1, _SAMPLED // (W[..., 0, :].size))
        cost = np.sum([_costs(w, f, storage, kinds[name], c, most) for w, f, c in each], axis=0)
        yield TensorCost(name, kinds[name], sizes[name], cost, columns, storage.together.get(name))


def by_expert(W: np.ndarray) -> np.ndarray:
    """The matrices in `W` (experts × rows × columns); one if it is a matrix."""
    return W.reshape(-1, *W.shape[-2:])


def _scaled(columns: np.ndarray) -> np.ndarray:
    """Importances (… × columns) with mean 1 and none at zero; equal ones where all are zero."""
    mean = columns.mean(-1, keepdims=True)
    scaled = (columns + _FLOOR * mean) / np.where(mean > 0, (1 + _FLOOR) * mean, 1)
    return np.where(mean > 0, scaled, 1).astype(np.float32)


def _costs(
    W: np.ndarray, F: np.ndarray, storage: Storage, kinds: Sequence[Any], columns: np.ndarray, most: int
) -> np.ndarray:
    """The cost of a matrix in each of `kinds` (K,), from `most` of its rows."""
    rows, share = _sample(W, F, most)
    W, F = W[rows], F[rows] * share[:, None]

    def part(kind: Any, rows: slice) -> float:
        moved = storage.rounded(W[rows], kind, columns) - W[rows]
        return 0.5 * float(np.sum(F[rows] * moved * moved, dtype=np.float64))

    return np.array([sum(in_parts(W, partial(part, kind))) for kind in kinds])


def _sample(W: np.ndarray, F: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """`most` rows, and how many of all rows each stands for (float32): every row once if there are no more.

    The rows are drawn evenly from the running sum of `Σ_j F_ij mean_j W_ij²`, near which their costs are, so that each
    stands for as much of the cost; a row that is drawn again counts again.
    """
    if len(W) <= most:
        return np.arange(len(W)), np.ones(len(W), np.float32)
    size = F.sum(1, dtype=np.float64) * np.square(W, dtype=np.float64).mean(1)
    total = size.cumsum()
    drawn = np.searchsorted(total, total[-1] * (np.arange(most) + 0.5) / most)
    rows, times = np.unique(drawn, return_counts=True)
    return rows, (times * total[-1] / most / np.maximum(size[rows], 1e-300)).astype(np.float32)


def in_parts(W: np.ndarray | torch.Tensor, work: Callable[[slice], T]) -> list[T]:
    """`work` on slices of the rows of `W`, in as many threads as torch uses."""
    size = max(1, _AT_ONCE // W.shape[1])
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(work, [slice(first, first + size) for first in range(0, len(W), size)]))
