"""Blocks of a file that make up for the errors of earlier ones, held against least squares."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.fed_back import fed_back
from lyapunov_prune.models.ggml import Kind, dequantised, quantised

BLOCK, COLUMNS = 32, 128
KINDS = (Kind.Q4_0, Kind.IQ4_NL, Kind.Q5_1)


def inputs_and_matrix(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (columns × tokens, float64) of which a few directions carry most, and a matrix of 24 rows."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(COLUMNS, 8, generator=random).double() @ torch.randn(8, 600, generator=random).double()
    return mixed + torch.randn(COLUMNS, 600, generator=random), torch.randn(24, COLUMNS, generator=random)


def rounded(W: torch.Tensor, kind: Kind) -> torch.Tensor:
    return torch.from_numpy(dequantised(quantised(W.float().numpy(), kind, np.ones(W.shape[1])), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_is_the_rounding_of_the_least_squares_solution_behind_the_earlier_ones(kind: Kind) -> None:
    X, W = inputs_and_matrix(0)
    Q = fed_back(W, kind, np.ones(COLUMNS, np.float32), X @ X.T)
    for start in range(BLOCK, COLUMNS, BLOCK):
        error = (W[:, :start] - Q[:, :start]).double() @ X[:start]
        best = W[:, start:] + torch.linalg.lstsq(X[start:].T, error.T).solution.T
        here = best[:, :BLOCK].contiguous()
        torch.testing.assert_close(Q[:, start : start + BLOCK], rounded(here, kind), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_outputs_move_less_than_without(kind: Kind, seed: int) -> None:
    X, W = inputs_and_matrix(seed)
    moved = [Q.double() @ X - W.double() @ X for Q in (fed_back(W, kind, np.ones(COLUMNS), X @ X.T), rounded(W, kind))]
    assert moved[0].norm() < moved[1].norm()


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0])
def test_a_row_of_one_block_and_wide_types_are_rounded_alone(kind: Kind) -> None:
    X, W = inputs_and_matrix(0)
    own, few = W[:, :BLOCK].contiguous(), X[:BLOCK]
    if kind is Kind.F16:
        own, few = W, X
    torch.testing.assert_close(fed_back(own, kind, np.ones(len(few)), few @ few.T), rounded(own, kind), rtol=0, atol=0)
