"""The sizes of parameters, to which learning rates are relative."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.healing.sharded import gathered


@torch.no_grad()
def update_sizes(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """Step size of each of the `parameters` (of `trained`) at a learning rate of 1, so that rates are relative.

    `rms(W)` for a parameter of the layers; if it is zero, the smallest of the others. For the factors of
    `low_rank_updates`, `1/√n` for A and `rms(W) √(n/rank)` for B, so that a step of B at rate r changes `W + B A` by
    about r · rms(W).
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    sizes: dict[str, float] = {}
    for name, parameter in parameters.items():
        module, _, side = name.rpartition(".")
        if side == "B" and f"{module}.A" in parameters:
            rank, n = parameters[f"{module}.A"].shape[-2:]
            # For experts stored as one parameter, `module` already names that parameter.
            weight = known[module] if module in known else known[f"{module}.weight"]
            sizes[name] = rms(weight) * (n / rank) ** 0.5
        else:
            sizes[name] = rms(parameter)
    least = min((size for size in sizes.values() if size > 0), default=1.0)
    return {name: size or least for name, size in sizes.items()}


def rms(W: torch.Tensor) -> float:
    """`√mean(W²)`."""
    return float(gathered(torch.linalg.vector_norm(W.detach().float()))) / W.numel() ** 0.5
