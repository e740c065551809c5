"""Reduction `scaled`: the gate becomes the constant that fits each unit best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.lazy import torch
from lyapunov_prune.merging.reduction import GateConstant

if TYPE_CHECKING:
    from lyapunov_prune.calibration.blocks import BlockSums


class Scaled(GateConstant):
    """`c_i = E[g_i u_i²]/E[u_i²]`, the least-squares fit of each `g_i u_i` by `u_i`; 0 where `u_i` was always zero."""

    help = "the gate is replaced by the constant that fits each unit best"
    reference = "for gates, which the paper does not treat"
    needs = ("gate_up_up", "up_up")

    def constant(self, sums: BlockSums) -> torch.Tensor:
        energy = sums["up_up"]
        return torch.where(energy > 0, sums["gate_up_up"] / energy.clamp_min(1e-300), 0)
