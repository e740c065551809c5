"""How many tokens a text shares with another one, at any position, by hashes of runs of tokens.

Only the fingerprint of one text is needed: the hashes of every few runs. All runs of the other text are looked up in
it, so shifts and other window boundaries do not matter.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass

import numpy as np

# Tokens between hashed runs (more in long texts), and the largest number of hashes.
_STRIDE, _MOST = 8, 4096
_BASE = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of the runs of `size` tokens that begin at 0, `stride`, 2 `stride`, … of a text, as base64.

    Any `size + stride - 1` consecutive tokens contain one of these runs.
    """

    size: int
    stride: int
    hashes: str


def run_hashes(tokens: np.ndarray, size: int) -> np.ndarray:
    """Hashes of all runs of `size` tokens in each row: (…, n) ids to (…, n − size + 1) uint64.

    `Σ_j h(x_{i+j}) b^j mod 2^64`, computed from prefix sums, so the time does not depend on `size`.
    """
    x = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_MIX)
    x ^= x >> np.uint64(29)
    n = x.shape[-1]
    powers = np.cumprod(np.full(n, _BASE, dtype=np.uint64))
    inverses = np.cumprod(np.full(n, pow(_BASE, -1, 2**64), dtype=np.uint64))
    sums = np.cumsum(x * powers, axis=-1, dtype=np.uint64)
    ends, starts = sums[..., size - 1 :], np.zeros_like(sums[..., size - 1 :])
    starts[..., 1:] = sums[..., : n - size]
    return (ends - starts) * inverses[: n - size + 1]


def fingerprint(tokens: np.ndarray, size: int) -> Fingerprint:
    """Fingerprint of a text (n,) with runs of `size` tokens, or the whole text if it is shorter; at most 44 kB."""
    size = min(size, len(tokens))
    hashes = run_hashes(tokens, size)
    stride = max(_STRIDE, math.ceil(len(hashes) / _MOST))
    return Fingerprint(size, stride, base64.b64encode(hashes[::stride].astype("<u8").tobytes()).decode())


def shared_tokens(tokens: np.ndarray, seen: Fingerprint) -> int:
    """How many of `tokens` (n,) are in runs that the fingerprinted text contains too, up to its stride."""
    if len(tokens) < seen.size:
        return 0
    known = np.frombuffer(base64.b64decode(seen.hashes), dtype="<u8")
    starts = np.flatnonzero(np.isin(run_hashes(tokens, seen.size), known))
    ends = np.minimum(starts + max(seen.size, seen.stride), len(tokens))
    change = np.bincount(starts, minlength=len(tokens) + 1) - np.bincount(ends, minlength=len(tokens) + 1)
    return int((np.cumsum(change) > 0).sum())
