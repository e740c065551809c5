"""How far hidden state, logits and probabilities turn, by kind of token and by event."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from lyapunov_prune.evaluation.judging import compare
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import Result
from lyapunov_prune.results.wording import between

FIRST, LATE = 4, 1024  # positions of a window that count as its first, and the tokens before one that is late
# The words of an answer for the kinds that are events: faults of a file show there while its mean is fine.
EVENTS = {
    "first": "at the first tokens",
    "end": "where a turn ends or calls a tool",
    "bracket": "where a bracket closes",
    "late": f"after {LATE:,} tokens",
    "beyond": "beyond the sliding window",
}
KINDS = ("all", *EVENTS, "rare", "number", "other")
SPACES = ("hidden", "logit", "probability")
_FAR, _FEWEST = 5.0, 4  # an event is told if its KL is so many times that elsewhere, over so many positions at least
_MARK = re.compile(r"\s*[<\[].+[>\]]\s*")  # an added token that marks something: `<tool_call>`, `[INST]`
_CLOSING = re.compile(r"\s*[\"']?[)\]}]+[.,;:]?\s*")


@dataclass(frozen=True)
class TokenKinds(Result):
    """Means over the positions of each of `KINDS` (K), from the final state to the prediction.

    `turned` (3, K) is `1 − cos` between dense and compressed, for the hidden state that the head reads, logits and
    probabilities; `kl` (K,) is `KL(p‖q)` in nats and `interval` (K, 2) its 95 % interval over windows
    (`judging.compare`), NaN for fewer than four windows with that kind; `positions` (K,) are counts. NaN for a kind
    that does not occur.

    `first` are the predictions at the first four positions of a window. By the token that is predicted: `end` are
    special tokens of the tokenizer other than BOS, and added tokens in brackets (`<tool_call>`); `bracket` a closing
    bracket; `rare` occur once in the text; `number` have a digit; without a tokenizer `rare` alone is known. `late`
    have 1,024 tokens or more before them, `beyond` more than the dense model's sliding window. `other` are none of
    `first`, `end`, `bracket`, `rare` and `number`. Kinds may overlap.
    """

    positions: Annotated[np.ndarray, Per(len(KINDS))]
    turned: Annotated[np.ndarray, Per(3, len(KINDS), least=-1e-9, finite=False)]
    kl: Annotated[np.ndarray, Per(len(KINDS), least=-1e-9, finite=False)]
    interval: Annotated[np.ndarray, Per(len(KINDS), 2, least=-np.inf, finite=False)]

    def to_frame(self) -> pd.DataFrame:
        """`head` and `softmax` are ratios of `1 − cos` after to that before; below 1 the error gets smaller there."""
        hidden, logit, probability = self.turned
        with np.errstate(divide="ignore", invalid="ignore"):
            quotients = {"head": logit / hidden, "softmax": probability / logit}
        columns = dict(zip(SPACES, self.turned, strict=True))
        low, high = self.interval.T
        ends = {"kl": self.kl, "kl_low": low, "kl_high": high}
        return pd.DataFrame({"token": KINDS, "positions": self.positions.astype(int), **columns, **quotients, **ends})

    def brief(self) -> pd.DataFrame:
        return self.to_frame()[self.positions > 0]

    def event(self) -> str:
        """Where KL is far above that elsewhere, as words behind the mean; empty if it is at no event.

        Far is five times the KL of all other positions, with an interval that ends above it.
        """
        count, total = self.positions, np.nan_to_num(self.kl) * self.positions
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = (total[0] - total) / (count[0] - count)
        far = (count >= _FEWEST) & (self.kl > _FAR * rest) & ~(self.interval[:, 0] <= rest)
        found = [k for k, kind in enumerate(KINDS) if kind in EVENTS and far[k]]
        if not found:
            return ""
        worst = max(found, key=lambda k: self.kl[k])
        return (
            f"{self.kl[worst]:.3g} {EVENTS[KINDS[worst]]} ({int(count[worst])} positions, "
            f"{between(*self.interval[worst])}) against {rest[worst]:.3g} elsewhere"
        )

    def answer(self) -> list[str]:
        hidden, logit, probability = self.turned[:, 0]
        if not hidden > 0:
            return []
        steps = ((hidden, logit), (logit, probability))
        head, softmax = ("shrinks it" if after < before else "enlarges it" for before, after in steps)
        line = (
            f"From state to prediction, 1 − cos: hidden {hidden:.3g}, logits {logit:.3g}, probabilities "
            f"{probability:.3g}: the head {head}, the softmax {softmax}"
        )
        known = {k: value for k, value in zip(KINDS[1:-1], self.kl[1:-1], strict=True) if np.isfinite(value)}
        if not known:
            return [f"{line}."]
        worst = max(known, key=known.__getitem__)
        where = EVENTS.get(worst, f"at {worst} tokens")
        return [f"{line}. Of all kinds of token, KL is largest {where}: {known[worst]:.3g}."]


class TokenSums:
    """Sums of `TokenKinds`, window by window."""

    def __init__(self, reading: Reading) -> None:
        ids = torch.cat([window.flatten() for window in reading.windows(1)])
        values, counts = ids.unique(return_counts=True)
        tokenizer: Any = reading.decoder.tokenizer
        decoded = {} if tokenizer is None else {i: tokenizer.decode([i]) for i in values.tolist()}
        ends = set() if tokenizer is None else _ends(tokenizer)
        self._chosen = {
            "end": ends,
            "bracket": {i for i, text in decoded.items() if _CLOSING.fullmatch(text)} - ends,
            "rare": set(values[counts == 1].tolist()),
            "number": {i for i, text in decoded.items() if any(c.isdigit() for c in text)} - ends,
        }
        self._window = getattr(reading.structure.config, "sliding_window", None)
        self._sums: list[np.ndarray] = []  # of each window (4, K)
        self._positions: list[np.ndarray] = []

    def add(self, turned: torch.Tensor, kl: torch.Tensor, ids: torch.Tensor) -> None:
        """One window: `turned` (3, positions) and `kl` (positions,) of the compressed model, as `predictions` gives."""
        found = torch.cat([turned, kl.unsqueeze(0)]).numpy()
        wanted = ids[0, 1:].tolist()
        before = np.arange(1, len(wanted) + 1)  # tokens before the predicted one
        kinds = {kind: np.array([i in chosen for i in wanted]) for kind, chosen in self._chosen.items()}
        kinds["first"] = before <= FIRST
        none = ~np.any(list(kinds.values()), axis=0)
        kinds |= {"all": none | True, "other": none, "late": before >= LATE}
        kinds["beyond"] = before > (self._window or np.inf)
        rows = np.stack([kinds[kind] for kind in KINDS])
        self._sums.append(found @ rows.T)
        self._positions.append(rows.sum(-1))

    def result(self) -> TokenKinds:
        sums, positions = np.array(self._sums), np.array(self._positions, np.float64)
        counts = positions.sum(0)
        means = np.divide(sums.sum(0), counts, out=np.full_like(sums[0], np.nan), where=counts > 0)
        pairs = zip(sums[:, 3].T, positions.T, means[3], strict=True)
        interval = np.array([_interval(some, count, mean) for some, count, mean in pairs])
        return TokenKinds(counts, means[:3], means[3], interval)


def _interval(sums: np.ndarray, counts: np.ndarray, mean: float) -> tuple[float, float]:
    """95 % interval of Σ sums / Σ counts over the windows that have the kind: of the ratio's linear terms."""
    sums, counts = sums[counts > 0], counts[counts > 0]
    if not len(counts):
        return np.nan, np.nan
    told = compare(np.zeros(len(sums)), mean + (sums - mean * counts) / counts.mean())
    return told.low, told.high


def _ends(tokenizer: Any) -> set[int]:
    """The ids of EOS and of other special tokens except BOS, and of added tokens that mark something."""
    added = {i for token, i in tokenizer.get_added_vocab().items() if _MARK.fullmatch(token)}
    begins = {tokenizer.bos_token_id} - {tokenizer.eos_token_id}
    return ({*tokenizer.all_special_ids} | added) - begins
