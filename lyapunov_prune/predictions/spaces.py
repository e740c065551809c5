"""What a change of a vector does to its direction, and a change of logits to the prediction.

Everything is taken row by row in float64: the rows are tokens, the columns the width or the vocabulary.
"""

from __future__ import annotations

import torch

from lyapunov_prune.linalg import lift
from lyapunov_prune.predictions.softmax import divergences, squared, variance_r

HIDDEN = ("hidden", "hidden_estimate", "hidden_parallel", "hidden_orthogonal")
LOGITS = ("logit", "logit_estimate", "logit_parallel", "logit_orthogonal")
PROBABILITIES = (
    "probability",
    "probability_estimate",
    "kl_estimate",
    "kl",
    "reverse_kl",
    "span",
    "deviation",
    "deviation_r",
    "uniform_variance",
)


def turn(v: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """How `changed = v + Δ` turned away from `v`, both (rows × width), as (4 × rows), float64.

    `1 − cos(v, v + Δ)`; its second-order estimate `‖Δ⊥‖²/(2‖v‖²)`; `‖Δ∥‖/‖v‖` and `‖Δ⊥‖/‖v‖`, with Δ∥ the part of
    Δ along v and Δ⊥ the rest (Demystifying When Pruning Works via Representation Hierarchies, Theorem 1, eqs. 6
    and 7). NaN where v is zero.
    """
    v = lift(v)
    delta = lift(changed).to(v.device) - v  # two models, or two layers of one, may be on two devices
    size = torch.linalg.vector_norm(v, dim=-1)
    along = torch.linalg.vecdot(v, delta) / size.square()
    across = torch.linalg.vector_norm(delta - along.unsqueeze(-1) * v, dim=-1) / size
    length = torch.hypot(1 + along, across)  # ‖v + Δ‖ / ‖v‖
    # 1 − (1 + along)/length without the cancellation where the angle is small.
    turned = torch.where(along > -1, across.square() / (length + 1 + along), length - 1 - along) / length
    return torch.stack([turned, across.square() / 2, along.abs(), across])


def prediction_measures(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """What a change of the logits did to `p = softmax(z/T)`, as (9 × rows); both (rows × vocabulary), float64.

    With `d = Δz/T`, which is `log q − log p` up to a number of the row's own: `1 − cos(p, q)` and its estimate
    `Var_r(d)/2`, `r_i = p_i²/‖p‖²` (Theorem 2, eq. 8); `Var_p(d)/2`, the estimate (Theorem 3, eq. 9) of `KL(p‖q)`;
    that, and `KL(q‖p)`; `max d − min d`; `c = max |d − E_p d|`; `max |d − E_r d|`; and `Var(d)` with every token alike.
    """
    p, u = log_p.exp(), log_q - log_p
    turned = turn(p, log_q.exp())[0]
    low, high = u.aminmax(dim=-1)
    r = squared(log_p)
    mean, mean_r = torch.linalg.vecdot(p, u), torch.linalg.vecdot(r, u)
    return torch.stack(
        [
            turned,
            variance_r(r, u),
            *divergences(log_p, log_q),
            high - low,
            torch.maximum(high - mean, mean - low),
            torch.maximum(high - mean_r, mean_r - low),
            u.var(-1, correction=0),
        ]
    )
