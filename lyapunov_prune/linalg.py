"""Small linear algebra in float64, shared by every measurement."""

from __future__ import annotations

import torch

from lyapunov_prune.norms import certified_norm, estimated_norm, exact_norm

__all__ = ["certified_norm", "estimated_norm", "exact_norm", "lift", "token_energy", "widen"]


def widen(x: torch.Tensor) -> torch.Tensor:
    """At least float32, exactly: differences of float16 and bfloat16 values are taken there."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def lift(x: torch.Tensor) -> torch.Tensor:
    """`x` in float64, on the CPU where its device has none (MPS)."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def token_energy(x: torch.Tensor) -> torch.Tensor:
    """`‖x_t‖²` of every token: (…, d) to (…), squares summed in float64 whatever the dtype of `x`.

    On devices without float64 (MPS) the sum moves to the CPU.
    """
    if x.device.type == "mps":
        x = x.cpu()
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square()
