"""The states that modules keep between tokens, outside of any cache."""

from __future__ import annotations

import torch

from lyapunov_prune.models.structure import Structure


def forget_states(structure: Structure) -> None:
    """Clear what RecurrentGemma's modules keep of the last forward; states in a cache are dropped with it."""
    for module in structure.layers.modules():
        for name in ("recurrent_states", "conv1d_state"):
            if isinstance(vars(module).get(name), torch.Tensor):
                setattr(module, name, None)
