"""KL from the dense prediction, and loss, of many changed models on the same positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.predictions.softmax import kl, log_softmax, require_finite_logits
from lyapunov_prune.predictions.spaces import turn

_ENTRIES = 2**18  # of positions × vocabulary, compared at once: small enough for the CPU cache


class Blame:
    """Sums over positions of KL and loss, float64: `sums` is (2 + 2 (L + 2), 2).

    Its rows are the dense model, the compressed one, and for the embedding, each of L layers and the head in turn: this
    alone compressed, and all but this. What does not differ costs nothing alone, and its return saves nothing.
    """

    def __init__(self, layers: int) -> None:
        self.sums = np.zeros((2 + 2 * (layers + 2), 2))
        self.positions = 0

    def add(self, found: torch.Tensor, parts: Sequence[int]) -> None:
        """`found` as `predictions` gives it first for the compressed model and both of each of `parts`, by number."""
        summed = found.sum(-1).numpy()
        rows = np.tile(summed[:2], (len(self.sums) // 2, 1))
        for number, part in enumerate(parts):
            rows[2 + 2 * part : 4 + 2 * part] = summed[2 + 2 * number : 4 + 2 * number]
        self.sums += rows
        self.positions += found.shape[-1]


def predictions(
    dense: tuple[Scorer, torch.Tensor], changed: Sequence[tuple[Scorer, torch.Tensor]], wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`KL(p‖q)` and the loss `−log q(wanted)` of every position, in nats: (1 + changes, 2, positions) float64.

    Row 0 is the dense model, whose KL is 0. From the same logits also `1 − cos` between hidden state, logits and
    probabilities of the dense model and of the first of `changed`: (3, positions). `dense` and each of `changed` are a
    scorer and final states (positions × width), `wanted` the token that comes next. A block of positions × vocabulary
    is in memory at a time.

    Raises LyapunovPruneError for dense logits that are not finite, and where the vocabularies differ.
    """
    found: list[torch.Tensor] = []
    turned: list[torch.Tensor] = []
    scorer, state = dense
    for start in range(0, len(state), max(1, _ENTRIES // scorer.vocabulary)):
        part = slice(start, start + max(1, _ENTRIES // scorer.vocabulary))
        z = scorer.logits(state[part])
        require_finite_logits(z)
        log_p = log_softmax(z, 1.0)
        here = wanted[part].to(log_p.device).unsqueeze(-1)
        rows = [torch.stack([torch.zeros(len(log_p)).to(log_p), -log_p.gather(-1, here).squeeze(-1)])]
        for number, (other, states) in enumerate(changed):
            theirs = other.logits(states[part]).to(z.device)
            if theirs.shape != z.shape:
                raise LyapunovPruneError(
                    f"vocabularies of {z.shape[-1]} and {theirs.shape[-1]}; compare two versions of one model"
                )
            log_q = log_softmax(theirs, 1.0)
            if number == 0:
                pairs = (state[part], states[part]), (z, theirs), (log_p.exp(), log_q.exp())
                turned.append(torch.stack([turn(a, b)[0] for a, b in pairs]).cpu())
            rows.append(torch.stack([kl(log_p, log_q), -log_q.gather(-1, here).squeeze(-1)]))
        found.append(torch.stack(rows).cpu())
    return torch.cat(found, dim=-1), torch.cat(turned, dim=-1)
