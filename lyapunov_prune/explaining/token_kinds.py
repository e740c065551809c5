"""How far hidden state, logits and probabilities turn, by kind of token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import Result

KINDS = ("all", "first", "rare", "number", "other")
FIRST = 4  # positions of a window that count as its first
SPACES = ("hidden", "logit", "probability")


@dataclass(frozen=True)
class TokenKinds(Result):
    """Means over the positions of each of `KINDS` (K), from the final state to the prediction.

    `turned` (3, K) is `1 − cos` between dense and compressed, for the hidden state that the head reads, logits and
    probabilities; `kl` (K,) is `KL(p‖q)` in nats; `positions` (K,) are counts. NaN for a kind that does not occur.
    `first` are the predictions at the first four positions of a window; `rare` predict a token that occurs once in the
    text; `number` predict a token with a digit (none without a tokenizer); `other` are none of these. Kinds may
    overlap.
    """

    positions: Annotated[np.ndarray, Per(len(KINDS))]
    turned: Annotated[np.ndarray, Per(3, len(KINDS), least=-1e-9, finite=False)]
    kl: Annotated[np.ndarray, Per(len(KINDS), least=-1e-9, finite=False)]

    def to_frame(self) -> pd.DataFrame:
        """`head` and `softmax` are ratios of `1 − cos` after to that before; below 1 the error gets smaller there."""
        hidden, logit, probability = self.turned
        with np.errstate(divide="ignore", invalid="ignore"):
            quotients = {"head": logit / hidden, "softmax": probability / logit}
        columns = dict(zip(SPACES, self.turned, strict=True))
        return pd.DataFrame(
            {"token": KINDS, "positions": self.positions.astype(int), **columns, **quotients, "kl": self.kl}
        )

    def answer(self) -> list[str]:
        hidden, logit, probability = self.turned[:, 0]
        if not hidden > 0:
            return []
        head, softmax = (
            "forgives" if after < before else "sharpens" for before, after in ((hidden, logit), (logit, probability))
        )
        line = (
            f"From state to prediction, 1 − cos: hidden {hidden:.3g}, logits {logit:.3g}, probabilities "
            f"{probability:.3g}: the head {head}, the softmax {softmax}"
        )
        named = self.kl[1:4]
        if not np.isfinite(named).any():
            return [f"{line}."]
        worst = int(np.nanargmax(named))
        kind = ("the first tokens", "rare tokens", "numbers")[worst]
        return [f"{line}. Of first, rare and number tokens, KL is largest at {kind}: {named[worst]:.3g}."]


class TokenSums:
    """Sums of `TokenKinds` over windows."""

    def __init__(self, reading: Reading) -> None:
        ids = torch.cat([window.flatten() for window in reading.windows(1)])
        values, counts = ids.unique(return_counts=True)
        self.once = set(values[counts == 1].tolist())
        tokenizer = reading.decoder.tokenizer
        decoded = {} if tokenizer is None else {i: tokenizer.decode([i]) for i in values.tolist()}
        self.digits = {i for i, text in decoded.items() if any(c.isdigit() for c in text)}
        self.sums = np.zeros((4, len(KINDS)))
        self.positions = np.zeros(len(KINDS))

    def add(self, turned: torch.Tensor, kl: torch.Tensor, ids: torch.Tensor) -> None:
        """`turned` (3, positions) and `kl` (positions,) of the compressed model, as `predictions` gives them."""
        found = torch.cat([turned, kl.unsqueeze(0)]).numpy()
        wanted = ids[:, 1:]
        place = torch.arange(wanted.shape[1]).expand(wanted.shape)
        first = (place < FIRST).flatten().numpy()
        rare, number = (
            np.array([i in chosen for i in wanted.flatten().tolist()]) for chosen in (self.once, self.digits)
        )
        kinds = np.stack([np.ones_like(first), first, rare, number, ~(first | rare | number)])
        self.sums += found @ kinds.T
        self.positions += kinds.sum(-1)

    def result(self) -> TokenKinds:
        means = np.divide(self.sums, self.positions, out=np.full_like(self.sums, np.nan), where=self.positions > 0)
        return TokenKinds(self.positions, means[:3], means[3])
