"""Change of direction of a vector, and change of a prediction when its logits change.

All functions work row by row in float64: rows are tokens, columns are the width or the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.linalg import lift, require_numbers

DENSE_LOGITS = "logits of the dense model"
# Entries of a tile of tokens × vocabulary: 32 MiB in float64, large enough for an efficient matrix product.
_CHUNK = 2**22
# Entries of logits that are compared at once: small enough for the CPU cache.
BLOCK = 2**18


# Logits z (rows × vocabulary) and `log softmax(z/T)`, float64.
Prediction = tuple[torch.Tensor, torch.Tensor]


def prediction_blocks(
    scorer: Scorer, dense: torch.Tensor, changed: Sequence[torch.Tensor], temperature: float
) -> Iterator[tuple[int, Prediction, Prediction]]:
    """Yield predictions from the dense final states (positions × width) next to those of each of `changed`.

    Each item is the index of the change, the dense prediction and the changed one, for one block of positions, in the
    order of the positions for every index. Dense logits are computed once; one tile of tokens × vocabulary is in
    memory. Raises LyapunovPruneError when they are not finite, and whatever `Scorer.logits` raises.
    """
    chunk, rows = (max(1, entries // scorer.vocabulary) for entries in (_CHUNK, BLOCK))
    for start in range(0, len(dense), chunk):
        part = slice(start, start + chunk)
        z = scorer.logits(dense[part])
        require_numbers(z, DENSE_LOGITS)
        known = [(b, log_softmax(b, temperature)) for b in z.split(rows)]
        for number, states in enumerate(changed):
            for p, b in zip(known, scorer.logits(states[part].to(dense)).split(rows), strict=True):
                yield number, p, (b, log_softmax(b, temperature))


def log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (lift(logits) / temperature).log_softmax(-1)


def squared(log_p: torch.Tensor) -> torch.Tensor:
    """`r_i = p_i²/‖p‖²` of every row, the token weights of the angle between probabilities."""
    return (2 * log_p).softmax(-1)


def variance_r(r: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """`Var_r(u) / 2` of every row, invariant to a constant added to a row of `u`."""
    return torch.linalg.vecdot(r, (u - torch.linalg.vecdot(r, u).unsqueeze(-1)).square()) / 2


def divergences(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Var_p(u) / 2`, `KL(p‖q)` and `KL(q‖p)` of every row, with `u = log q − log p`; (rows × vocabulary) float64.

    `u` equals `Δz/T` up to a constant per row, which no variance depends on. The divergences are computed as `Σ (q − p
    − p u)` and `Σ (q u − q + p)`. As `Σ q = Σ p` these equal `−Σ p u` and `Σ q u`, but every term is non-negative, so
    nothing cancels, and an error in the normaliser enters in second order only.
    """
    p, q, u, moved = _moved(log_p, log_q)
    mean = torch.linalg.vecdot(p, u).unsqueeze(-1)
    return (torch.linalg.vecdot(p, (u - mean).square()) / 2, (moved - p * u).sum(-1), (q * u - moved).sum(-1))


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """`KL(p‖q)` of every row, as `divergences` has it, without the others."""
    p, _, u, moved = _moved(log_p, log_q)
    return (moved - p * u).sum(-1)


def _moved(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`p`, `q`, `u`, and `q − p` without cancellation; `expm1` overflows for large u."""
    p, q, u = log_p.exp(), log_q.exp(), log_q - log_p
    return p, q, u, torch.where(u < 1, p * torch.expm1(u), q - p)


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
