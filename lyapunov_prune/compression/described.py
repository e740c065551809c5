"""What a report says of one compressed matrix: its errors, zeros, rank and bits."""

from __future__ import annotations

import math

import torch

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.method import Method
from lyapunov_prune.compression.report import CompressedMatrix
from lyapunov_prune.linalg import lift, row_blocks, token_energy, widen
from lyapunov_prune.models.projections import Projection


def described(
    p: Projection,
    method: Method,
    W: torch.Tensor,
    after: torch.Tensor,
    statistics: Statistics | None,
    wanted: float,
    amount: float | None,
) -> CompressedMatrix:
    """What a report says of `W` and of `after`, which replaces it; `wanted` is the allocated amount."""
    error, whole, zeros = _sums(W, after)
    gram = statistics.gram if statistics is not None else None
    return CompressedMatrix(
        name=p.name,
        layer=p.layer,
        component=p.component,
        rows=W.shape[0],
        columns=W.shape[1],
        amount=wanted,
        zeros=zeros / after.numel(),
        rank=int(amount) if method.unit == "rank" and amount is not None else None,
        bits=amount if method.unit == "bits" else None,
        weight_error=_share(error, whole),
        output_error=None if gram is None else _output_error(lift(W), lift(after), gram),
        tokens=None if statistics is None else statistics.tokens,
    )


def _sums(W: torch.Tensor, after: torch.Tensor) -> tuple[float, float, int]:
    """`‖W − Ŵ‖_F²` and `‖W‖_F²`, squares summed in float64, and how many entries of `Ŵ` are zero."""
    error = whole = 0.0
    zeros = after.numel()
    for rows, left in zip(row_blocks(W), row_blocks(after), strict=True):
        error += float(token_energy(widen(rows) - widen(left)).sum())
        whole += float(token_energy(rows).sum())
        zeros -= int(left.bool().count_nonzero())  # bool first: on half precision the count takes twenty times as long
    return error, whole, zeros


def _output_error(W: torch.Tensor, after: torch.Tensor, gram: torch.Tensor) -> float:
    """`‖(W − Ŵ) X‖_F / ‖W X‖_F` for `gram = X Xᵀ`, all float64."""
    error, whole = (float(((A @ gram) * A).sum()) for A in (W - after, W))
    return _share(error, whole)


def _share(error: float, whole: float) -> float:
    return math.sqrt(max(error, 0.0) / whole) if whole > 0 else 0.0
