"""What every matrix takes and costs in every block type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from lyapunov_prune.budget.fisher import fisher, matrices_of
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.models.ggml import Kind, bits_of, dequantised, fits, quantised

T = TypeVar("T")
# All that llama.cpp runs from 2 to 16 bits. Types of fewer bits are beyond what second order predicts.
KINDS = (
    *(Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.Q2_K, Kind.IQ3_XXS, Kind.IQ3_S, Kind.Q3_K),
    *(Kind.IQ4_XS, Kind.MXFP4, Kind.IQ4_NL, Kind.Q4_0, Kind.Q4_K, Kind.Q4_1),
    *(Kind.Q5_0, Kind.Q5_K, Kind.Q5_1, Kind.Q6_K, Kind.Q8_0, Kind.BF16, Kind.F16),
)
# Types of fewer bits than this share of the mean are not tried, to save time: they are the slowest to write.
_NARROW = 0.6
_AT_ONCE = 2**20  # numbers rounded at once
_SAMPLED = 2**18  # numbers of a matrix that are rounded for its costs
_FLOOR = 1e-6  # of the mean importance: a block whose columns all have none would have no scale


@dataclass(frozen=True, eq=False)
class TensorCost:
    """A matrix in each of `kinds`: `bytes` (K,) and `cost` (K,), nats a token; `importance` (columns,) rounds it."""

    name: str
    kinds: tuple[Kind, ...]
    bytes: np.ndarray
    cost: np.ndarray
    importance: np.ndarray


def kinds_for(columns: int, bits: float = 0.0) -> list[Kind]:
    """The types that rows of so many columns can take, narrowest first, for a mean of `bits` a weight."""
    fitting = [kind for kind in KINDS if fits(kind, columns)]
    narrow = min(fitting, key=bits_of)
    return [kind for kind in fitting if kind is narrow or bits_of(kind) >= _NARROW * bits]


def size_in(kind: Kind, numbers: int) -> int:
    return int(numbers * bits_of(kind)) // 8


def costs(
    reading: Reading, *, bits: float = 0.0, seed: int = 0, importance: Mapping[str, np.ndarray] | None = None
) -> Iterator[TensorCost]:
    """The cost of every matrix of a model, `c(q) = ½ Σ_ij F_ij (Q_q(W)_ij − W_ij)²`, in the types of `kinds_for`.

    `F` is the diagonal of the Fisher information on the batch (`fisher`), and `c` the second-order estimate of the KL
    a token that rounding this matrix causes. Columns are weighted by `importance` where it has the matrix, else by
    `Σ_i F_ij`. Costs are summed in float64, one matrix in memory beside the model and the sums of `fisher`; of a large
    matrix over the rows of `_sample`.
    """
    matrices = matrices_of(reading.model)
    for name, found in fisher(reading, matrices, seed):
        W = matrices[name].detach().float().cpu().numpy()
        F = found.cpu().numpy()
        columns = (importance or {}).get(name)
        columns = F.sum(0, dtype=np.float64) if columns is None else np.asarray(columns, np.float64)
        columns = columns + _FLOOR * columns.mean() if columns.any() else np.ones_like(columns)
        columns = (columns / columns.mean()).astype(np.float32)
        kinds = tuple(kinds_for(W.shape[1], bits))
        rows, share = _sample(W, F, max(1, _SAMPLED // W.shape[1]))
        cost = np.array([_cost(W[rows], F[rows] * share[:, None], kind, columns) for kind in kinds])
        yield TensorCost(name, kinds, np.array([size_in(kind, W.size) for kind in kinds]), cost, columns)


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


def _cost(W: np.ndarray, F: np.ndarray, kind: Kind, importance: np.ndarray) -> float:
    def part(rows: slice) -> float:
        moved = dequantised(quantised(W[rows], kind, importance), kind) - W[rows]
        return 0.5 * float(np.sum(F[rows] * moved * moved, dtype=np.float64))

    return sum(in_parts(W, part))


def in_parts(W: np.ndarray, work: Callable[[slice], T]) -> list[T]:
    """`work` on slices of the rows of `W`, in as many threads as torch uses."""
    size = max(1, _AT_ONCE // W.shape[1])
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(work, [slice(first, first + size) for first in range(0, len(W), size)]))
