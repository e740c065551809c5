"""GPTQ onto the blocks of a `.gguf` file: later blocks make up for the errors of earlier ones."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES

from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.compression.second_order import inverse_factor
from lyapunov_prune.models.ggml import WIDE, Kind


def fed_back(W: torch.Tensor, kind: Kind, importance: np.ndarray, H: torch.Tensor) -> torch.Tensor:
    """`W` (m × n) in blocks of `kind`, each of which makes up for the errors of those before it: `Q`, float32.

    Block by block of columns B, `Q_B` is `W_B` as llama.cpp rounds it, and the columns R behind it become
    `W_R − (W_B − Q_B) ([(H_≥B)⁻¹]_BB)⁻¹ [(H_≥B)⁻¹]_BR`, which leaves the least `tr((W − Q) H (W − Q)ᵀ)` among all later
    columns; with `UᵀU = H⁻¹` (`inverse_factor`) the two factors are `U_BB⁻¹ U_BR`. `H` is n × n, float64. Rows of one
    block, and types of one number a block, are rounded without.
    """
    size, n = GGML_QUANT_SIZES[kind][0], W.shape[1]
    if kind in WIDE or size == n:
        return torch.from_numpy(BLOCKS.rounded(W.detach().numpy(), kind, importance))
    V, U = W.detach().double(), inverse_factor(H)
    for start in range(0, n, size):
        here, later = slice(start, start + size), slice(start + size, n)
        left = np.ascontiguousarray(V[:, here].float().numpy())
        error = V[:, here].clone()
        V[:, here] = torch.from_numpy(BLOCKS.rounded(left, kind, importance[here]))
        error -= V[:, here]
        V[:, later] -= error @ torch.linalg.solve_triangular(U[here, here], U[here, later], upper=True)
    return V.float()
