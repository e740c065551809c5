"""Whether a text that a model wrote repeats itself: its 3-grams, and the cycle that it ends in."""

from __future__ import annotations

# A text has collapsed when it ends in a cycle of at most so many tokens, ...
CYCLE = 8
# ... so many times over.
TIMES = 4


def repetition(tokens: tuple[int, ...], n: int) -> float:
    """`1 − (different n-grams) / (n-grams)` of a text, seq-rep-n of arXiv:1908.04319; 0 for one shorter than `n`."""
    grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def collapsed(tokens: tuple[int, ...]) -> bool:
    """Whether a text ends in a cycle of at most `CYCLE` tokens, `TIMES` times over. A detector, and no more."""
    return any(
        len(tokens) >= TIMES * period and tokens[-TIMES * period :] == tokens[-period:] * TIMES
        for period in range(1, CYCLE + 1)
    )
