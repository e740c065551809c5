"""What the experiments on bytes share: what every matrix reads and makes, and a model in chosen block types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.cost import TensorCost
from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.models.hooked import hooked


@torch.no_grad()
def read_and_made(reading: Reading) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The mean square of every input (columns,), and the mean energy `E‖Wx‖²`, of each matrix that multiplies states.

    Means are over the tokens of the reading, in float64, by the model's names; a bias is no part of the energy.
    """
    named = {id(p): name for name, p in matrices_of(reading.model).items()}
    matrices = [m for m in reading.model.modules() if isinstance(m, nn.Linear)]
    squares = {named[id(m.weight)]: np.zeros(m.in_features) for m in matrices}
    energy = dict.fromkeys(squares, 0.0)

    def add(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = named[id(module.weight)]
        made = output if module.bias is None else output - module.bias
        squares[name] += args[0].flatten(0, -2).double().square().sum(0).cpu().numpy()
        energy[name] += float(made.double().square().sum())

    with hooked(after=[(module, add) for module in matrices]):
        for ids in reading.windows(1):
            reading.model(ids, use_cache=False)
    tokens = reading.batch.tokens
    return {name: x / tokens for name, x in squares.items()}, {name: x / tokens for name, x in energy.items()}


@torch.no_grad()
def fill(small: nn.Module, dense: nn.Module, known: Sequence[TensorCost], pick: np.ndarray) -> None:
    """The matrices of `small` become those of `dense` in the types `pick`."""
    for t, k in zip(known, pick, strict=True):
        W = dense.get_parameter(t.name).detach().numpy()
        small.get_parameter(t.name).copy_(torch.from_numpy(BLOCKS.rounded(W, t.kinds[k], t.importance)))
