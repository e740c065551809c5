"""Grids whose steps are fitted to the weights, against a search by hand in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lyapunov_prune.compression.grids import fitted, stepped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fitted_steps_leave_the_least_weighted_error(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    W = torch.randn(6, 32, generator=random).to(dtype)
    W[0, :8] = 0
    importance = torch.rand(32, generator=random).square()
    found, widest = fitted(W, 4, 8, importance), stepped(W, 4, 8, symmetric=True)
    w, c = W.double().numpy().reshape(6, 4, 8), importance.double().numpy().reshape(1, 4, 8)

    def error(scale: np.ndarray) -> np.ndarray:
        q = np.clip(np.round(w / scale[..., None]), -8, 7)
        return (c * (scale[..., None] * q - w) ** 2).sum(-1)

    left, shares = error(found.scale.numpy()), np.linspace(0.7, 1, 13)
    tried = np.stack([error(share * widest.scale.numpy()) for share in shares])
    rounding = 1e-5 if dtype == torch.float32 else 0.05  # steps are numbers of the dtype
    assert (left <= tried.min(0) * (1 + rounding)).all()
    assert (left <= error(widest.scale.numpy()) * (1 + 1e-5) + 1e-12).all()
    assert left.sum() < 0.9 * error(widest.scale.numpy()).sum()
    assert torch.equal(found.scale.to(dtype).double(), found.scale)
