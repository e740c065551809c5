"""What every matrix takes and costs in every block type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
_LEAST = 0.35  # one narrower type stays, for matrices that have to make room for others: of at least this share
_AT_ONCE = 2**20  # numbers rounded at once
_SAMPLED = 2**18  # numbers of a matrix that are rounded for its costs
_FLOOR = 1e-6  # of the mean importance: a block whose columns all have none would have no scale


@dataclass(frozen=True, eq=False)
class TensorCost:
    """A matrix in each of `kinds`: `bytes` (K,) and `cost` (K,), nats a token.

    `importance` (columns,), or (experts × columns) of the experts that a tensor holds, rounds it.
    """

    name: str
    kinds: tuple[Kind, ...]
    bytes: np.ndarray
    cost: np.ndarray
    importance: np.ndarray


def kinds_for(columns: int, bits: float = 0.0) -> list[Kind]:
    """The types that rows of so many columns can take, narrowest first, for a mean of `bits` a weight."""
    fitting = [kind for kind in KINDS if fits(kind, columns)]
    narrow = min((kind for kind in fitting if bits_of(kind) >= _LEAST * bits), key=bits_of)
    return [kind for kind in fitting if kind is narrow or bits_of(kind) >= _NARROW * bits]


def size_in(kind: Kind, numbers: int) -> int:
    return int(numbers * bits_of(kind)) // 8


def costs(
    reading: Reading, *, bits: float = 0.0, seed: int = 0, importance: Mapping[str, np.ndarray] | None = None
) -> Iterator[TensorCost]:
    """The cost of every matrix of a model, `c(q) = ½ Σ_ij F_ij (Q_q(W)_ij − W_ij)²`, in the types of `kinds_for`.

    `F` is the diagonal of the Fisher information on the batch (`fisher`), and `c` the second-order estimate of the KL
    a token that rounding this matrix causes. Columns are weighted by `importance` where it has the matrix, else by
    `Σ_i F_ij`; experts in one tensor each have importances of their own, and their costs are added. Costs are summed in
    float64, one matrix in memory beside the model and the sums of `fisher`; of a large matrix over the rows of
    `_sample`.
    """
    matrices = matrices_of(reading.model)
    for name, found in fisher(reading, matrices, seed):
        W = matrices[name].detach().float().cpu().numpy()
        F = found.cpu().numpy()
        given = (importance or {}).get(name)
        columns = _scaled(F.sum(-2, dtype=np.float64) if given is None else np.asarray(given, np.float64))
        kinds = tuple(kinds_for(W.shape[-1], bits))
        each = zip(by_expert(W), by_expert(F), np.atleast_2d(columns), strict=True)
        most = max(1, _SAMPLED // (W[..., 0, :].size))
        cost = np.sum([_costs(w, f, kinds, c, most) for w, f, c in each], axis=0)
        yield TensorCost(name, kinds, np.array([size_in(kind, W.size) for kind in kinds]), cost, columns)


def by_expert(W: np.ndarray) -> np.ndarray:
    """The matrices in `W` (experts × rows × columns); one if it is a matrix."""
    return W.reshape(-1, *W.shape[-2:])


def _scaled(columns: np.ndarray) -> np.ndarray:
    """Importances (… × columns) with mean 1 and none at zero; equal ones where all are zero."""
    mean = columns.mean(-1, keepdims=True)
    scaled = (columns + _FLOOR * mean) / np.where(mean > 0, (1 + _FLOOR) * mean, 1)
    return np.where(mean > 0, scaled, 1).astype(np.float32)


def _costs(W: np.ndarray, F: np.ndarray, kinds: Sequence[Kind], columns: np.ndarray, most: int) -> np.ndarray:
    """The cost of a matrix in each of `kinds` (K,), from `most` of its rows."""
    rows, share = _sample(W, F, most)
    return np.array([_cost(W[rows], F[rows] * share[:, None], kind, columns) for kind in kinds])


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
