"""Reduction `mean-gate`: the gate becomes its mean over tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.lazy import torch
from lyapunov_prune.merging.reduction import GateConstant

if TYPE_CHECKING:
    from lyapunov_prune.calibration.blocks import BlockSums


class MeanGate(GateConstant):
    """`c = E σ(W_g x + b_g)`."""

    help = "the gate is replaced by its mean over tokens"
    reference = "for gates, which the paper does not treat"
    needs = ("gate",)

    def constant(self, sums: BlockSums) -> torch.Tensor:
        return sums["gate"] / sums.tokens
