"""A merged feed-forward block held against the theorems on merging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.checkers import activation_replacement_bound, merged_projection, opNorm_merged_le
from lyapunov_prune.linalg import certify
from lyapunov_prune.merging.merge import Merged, merge_rounding
from lyapunov_prune.models.feedforward import Affine, lifted

_PROBES = 16


@torch.no_grad()
def check_merged(layers: nn.ModuleList, merged: Sequence[Merged]) -> tuple[BoundCheck, ...]:
    """Three checks of every merge of `layers`, which still have their blocks.

    `merged_projection`: the stored matrix and bias against the two maps that they were made of, on random inputs and
    on the one that the stored matrix stretches most. `activation_replacement_bound`: every token of the calibration,
    and the change of the hidden vector that `W_out` stretches most, which comes within 0.1 % of the bound.
    `opNorm_merged_le`: the same inputs as the first. All in float64, with the margin of `merge_rounding`.
    """
    return tuple(check for m in merged for check in _checks(m, m.block.parts(layers[m.block.layer]).out))


def _checks(m: Merged, out: Affine) -> tuple[BoundCheck, ...]:
    place: dict[str, Any] = {"matrix": f"{m.block.out.name} ({m.reduction})", "layer": m.block.layer}
    stored, last = lifted((m.weight, m.bias)), lifted(out)
    most = certify(m.weight)
    x = torch.randn(_PROBES, m.weight.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, most.direction.unsqueeze(0)]).to(stored[0].device)
    size = _norms(x)
    rounding = merge_rounding(out, m.tau, (m.weight, m.bias), size, np.zeros_like(size))
    error = _norms(linear(m.tau(x), *last) - linear(x, *stored))
    exact = merged_projection(error, rounding=rounding, **place)

    stretched = certify(out[0])
    on_tokens = activation_replacement_bound(
        m.cost.error, m.cost.change, m.cost.out_norm, rounding=m.cost.rounding, **place
    )
    change = stretched.direction.unsqueeze(0).to(last[0].device)
    on_probe = activation_replacement_bound(_norms(linear(change, last[0])), _norms(change), m.cost.out_norm, **place)

    norm = opNorm_merged_le(
        _norms(linear(x, stored[0])), size, m.cost.out_norm, certify(m.tau.weight).bound, rounding=rounding, **place
    )
    return exact, on_tokens.with_more(on_probe), norm


def _norms(x: torch.Tensor) -> np.ndarray:
    return torch.linalg.vector_norm(x, dim=-1).cpu().numpy()
