"""Compare two next-token predictions `softmax(z/T)`, on whole rows of logits in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.linalg import lift, require_numbers

DENSE_LOGITS = "logits of the dense model"
# Entries of a tile of tokens × vocabulary: 32 MiB in float64, large enough for an efficient matrix product.
_CHUNK = 2**22
# Entries per call of exp: small enough for the CPU cache.
_BLOCK = 2**18


class Prediction:
    """Logits `z` (rows × vocabulary) with a cached `log softmax`."""

    def __init__(self, z: torch.Tensor, temperature: float) -> None:
        self.z, self.temperature = z, temperature

    @cached_property
    def log(self) -> torch.Tensor:
        """`log softmax(z/T)`, float64."""
        return log_softmax(self.z, self.temperature)


def prediction_blocks(
    scorer: Scorer, dense: torch.Tensor, changed: Sequence[torch.Tensor], temperature: float
) -> Iterator[tuple[int, Prediction, Prediction]]:
    """Yield predictions from the dense final states (positions × width) next to those of each of `changed`.

    Each item is the index of the change, the dense prediction and the changed one, for one block of positions, in the
    order of the positions for every index. Dense logits are computed once; one tile of tokens × vocabulary is in
    memory. Raises LyapunovPruneError when they are not finite, and whatever `Scorer.logits` raises.
    """
    chunk, rows = (max(1, entries // scorer.vocabulary) for entries in (_CHUNK, _BLOCK))
    for start in range(0, len(dense), chunk):
        part = slice(start, start + chunk)
        z = scorer.logits(dense[part])
        require_numbers(z, DENSE_LOGITS)
        known = [Prediction(b, temperature) for b in z.split(rows)]
        for number, states in enumerate(changed):
            for p, b in zip(known, scorer.logits(states[part].to(dense)).split(rows), strict=True):
                yield number, p, Prediction(b, temperature)


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
    p, q, u = log_p.exp(), log_q.exp(), log_q - log_p
    moved = _moved(p, log_q, u)
    mean = torch.linalg.vecdot(p, u).unsqueeze(-1)
    return (torch.linalg.vecdot(p, (u - mean).square()) / 2, (moved - p * u).sum(-1), (q * u - moved).sum(-1))


def _moved(p: torch.Tensor, log_q: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """`q − p` without cancellation; `expm1` overflows for large u."""
    return torch.where(u < 1, p * torch.expm1(u), log_q.exp() - p)
