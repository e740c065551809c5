"""KL from the dense prediction, and loss, of many changed models on the same positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lyapunov_prune.forward.logits import require_one_vocabulary
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.predictions.spaces import DENSE_LOGITS, log_softmax, turn
from lyapunov_prune.predictions.tiles import measures

_ENTRIES = 2**22  # positions × vocabulary at a time: enough rows for an efficient product with the head
_ROWS = 4  # rows compared at a time: few enough for the CPU cache


class Blame:
    """KL and loss in nats a token, float64, as means over all positions added.

    `dense` and `compressed` (2,) are of the two models. `only` and `but` (2, L + 2) are, for the embedding, each of the
    L layers, and the head, of the model with this part alone compressed, and with all parts but this compressed. For a
    part that does not differ they equal those of the dense and of the compressed model.
    """

    def __init__(self, layers: int) -> None:
        self._models, self._parts = np.zeros((2, 2)), np.zeros((layers + 2, 2, 2))  # the last axis is KL and loss
        self._positions = np.zeros(())

    @property
    def dense(self) -> np.ndarray:
        return self._models[0] / self._positions

    @property
    def compressed(self) -> np.ndarray:
        return self._models[1] / self._positions

    @property
    def only(self) -> np.ndarray:
        return self._parts[:, 0].T / self._positions

    @property
    def but(self) -> np.ndarray:
        return self._parts[:, 1].T / self._positions

    def add(self, found: torch.Tensor, parts: Sequence[int]) -> None:
        """Add `found` of `predictions` for the compressed model, followed by two models for each number in `parts`."""
        models, *changed = found.sum(-1).numpy().reshape(-1, 2, 2)
        rows = np.tile(models, (len(self._parts), 1, 1))
        for part, pair in zip(parts, changed, strict=True):
            rows[part] = pair
        self._models += models
        self._parts += rows
        self._positions += found.shape[-1]


def predictions(
    dense: tuple[Scorer, torch.Tensor], changed: Sequence[tuple[Scorer, torch.Tensor]], wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`KL(p‖q)` and the loss `−log q(wanted)` of every position, in nats: (1 + changes, 2, positions) float64.

    Row 0 is the dense model, whose KL is 0. Also returns `1 − cos` between the dense model and the first of `changed`,
    for hidden state, logits and probabilities: (3, positions). `dense` and each of `changed` are a scorer and final
    states (positions × width); `wanted` is the token that comes next.

    Raises LyapunovPruneError for dense logits that are not finite, and for different vocabularies.
    """
    scorer, state = dense
    require_one_vocabulary(scorer.vocabulary, *(other.vocabulary for other, _ in changed))
    own, turned = _turned(dense, changed[0], wanted)
    found = own.repeat(1 + len(changed), 1, 1)
    differing = [
        number
        for number, (reader, states) in enumerate(changed)
        if reader is not scorer or not torch.equal(states.to(state), state)
    ]
    # Group them by scorer: consecutive states with one scorer share a product with its head.
    differing.sort(key=lambda number: changed[number][0] is not scorer)
    if differing:
        readers, states = zip(*(changed[number] for number in differing), strict=True)
        measured = measures(scorer, state, states, 1.0, read_by=readers, wanted=wanted)
        found[[1 + number for number in differing]] = measured[:, [1, 5]].cpu()
    return found, turned


def _turned(
    dense: tuple[Scorer, torch.Tensor], changed: tuple[Scorer, torch.Tensor], wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL and loss of the dense model, (2, positions), and `1 − cos` of `changed`, (3, positions), from whole rows."""
    (scorer, state), (other, states) = dense, changed
    own, turned = list[torch.Tensor](), list[torch.Tensor]()
    for here in torch.arange(len(state)).split(max(1, _ENTRIES // scorer.vocabulary)):
        z, theirs = scorer.logits(state[here]), other.logits(states[here])
        require_numbers(z, DENSE_LOGITS)
        for a, b, rows in zip(z.split(_ROWS), theirs.to(z.device).split(_ROWS), here.split(_ROWS), strict=True):
            log_p, log_q = log_softmax(a, 1.0), log_softmax(b, 1.0)
            loss = -log_p.gather(-1, wanted[rows].to(log_p.device).unsqueeze(-1)).squeeze(-1)
            own.append(torch.stack([torch.zeros_like(loss), loss]).cpu())
            pairs = (state[rows], states[rows]), (a, b), (log_p.exp(), log_q.exp())
            turned.append(torch.stack([turn(v, w)[0] for v, w in pairs]).cpu())
    return torch.cat(own, dim=-1), torch.cat(turned, dim=-1)
