"""Change of direction of a vector, and change of a prediction when its logits change.

All functions work row by row in float64: rows are tokens, columns are the width or the vocabulary.
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
    """Angle between `v` and `changed = v + Δ`, both (rows × width): (4, rows) float64.

    The rows are `1 − cos(v, v + Δ)`; its second-order estimate `‖Δ⊥‖²/(2‖v‖²)`; `‖Δ∥‖/‖v‖`; `‖Δ⊥‖/‖v‖`, where Δ∥ is the
    component of Δ along v and Δ⊥ the rest (Demystifying When Pruning Works via Representation Hierarchies, Theorem 1,
    eqs. 6 and 7). NaN where v is zero.
    """
    v = lift(v)
    delta = lift(changed).to(v.device) - v  # the models may be on different devices
    size = torch.linalg.vector_norm(v, dim=-1)
    along = torch.linalg.vecdot(v, delta) / size.square()
    across = torch.linalg.vector_norm(delta - along.unsqueeze(-1) * v, dim=-1) / size
    length = torch.hypot(1 + along, across)  # ‖v + Δ‖ / ‖v‖
    # 1 − (1 + along)/length without cancellation at small angles.
    turned = torch.where(along > -1, across.square() / (length + 1 + along), length - 1 - along) / length
    return torch.stack([turned, across.square() / 2, along.abs(), across])


def prediction_measures(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Change of `p = softmax(z/T)` under a change of the logits, (9, rows); inputs (rows × vocabulary) float64.

    With `d = Δz/T`, which is `log q − log p` up to a constant per row, the rows are: `1 − cos(p, q)` and its estimate
    `Var_r(d)/2`, `r_i = p_i²/‖p‖²` (Theorem 2, eq. 8); `Var_p(d)/2`, the estimate of `KL(p‖q)` (Theorem 3, eq. 9);
    `KL(p‖q)`; `KL(q‖p)`; `max d − min d`; `c = max |d − E_p d|`; `max |d − E_r d|`; and the unweighted `Var(d)`.
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
