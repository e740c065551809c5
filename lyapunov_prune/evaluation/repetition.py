"""Whether a generated text repeats itself: repeated 3-grams, and the cycle at its end."""

from __future__ import annotations

# A text has collapsed when it ends in a cycle of at most CYCLE tokens, ...
CYCLE = 8
# ... repeated TIMES times.
TIMES = 4


def repetition(tokens: tuple[int, ...], n: int) -> float:
    """`1 − (distinct n-grams) / (n-grams)` of a text, seq-rep-n of arXiv:1908.04319; 0 if it is shorter than `n`."""
    grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def collapsed(tokens: tuple[int, ...]) -> bool:
    """Whether a text ends in a cycle of at most `CYCLE` tokens repeated `TIMES` times (a heuristic)."""
    return any(
        len(tokens) >= TIMES * period and tokens[-TIMES * period :] == tokens[-period:] * TIMES
        for period in range(1, CYCLE + 1)
    )
