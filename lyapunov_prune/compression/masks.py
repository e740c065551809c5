"""Masks of the entries to remove, from a score of each. Among equal scores the earlier entry is removed."""

from __future__ import annotations

import re

from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.lazy import torch

Pattern = tuple[int, int]


def as_pattern(pattern: Pattern | str | None) -> Pattern | None:
    """(keep, of) from such a pair or from the text `2:4`. Raises LyapunovPruneError for anything else."""
    if pattern is None:
        return None
    keep, of = _pair(pattern) if isinstance(pattern, str) else pattern
    if not 0 < keep < of:
        raise LyapunovPruneError(f"pattern {pattern} does not keep a part; write it as 2:4, 2 of 4 kept")
    return keep, of


def _pair(text: str) -> Pattern:
    """(keep, of) from `2:4`, (0, 0) from any other text."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def per_row(score: torch.Tensor, sparsity: float) -> torch.Tensor:
    """True at the `round(sparsity · n)` smallest entries of each row of `score` (m × n)."""
    least = score.argsort(dim=1, stable=True)[:, : round(sparsity * score.shape[1])]
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, least, True)


def n_of_m(score: torch.Tensor, keep: int, of: int) -> torch.Tensor:
    """True at all but the `keep` largest of every `of` consecutive entries in each row of `score` (m × n), as in 2:4.

    Raises LyapunovPruneError if `of` does not divide n, and for `keep` outside 1 … of − 1.
    """
    m, n = score.shape
    require_pattern((keep, of), n)
    return per_row(score.reshape(-1, of), 1 - keep / of).view(m, n)


def row_mask(score: torch.Tensor, sparsity: float, pattern: Pattern | None) -> torch.Tensor:
    """`per_row`, or `n_of_m` if a pattern (keep, of) is given; the pattern must have this sparsity."""
    if pattern is None:
        return per_row(score, sparsity)
    require_pattern(pattern, score.shape[1], sparsity)
    return n_of_m(score, *pattern)


def require_pattern(pattern: Pattern, inputs: int, sparsity: float | None = None) -> None:
    """Raise LyapunovPruneError unless a pattern (keep, of) fits rows of `inputs` entries and has this sparsity."""
    as_pattern(pattern)
    keep, of = pattern
    wrong = {
        f"does not fit {inputs} inputs; {of} must divide them": inputs % of,
        f"has sparsity {1 - keep / of:g}, not {sparsity}; give that": (
            sparsity is not None and abs(sparsity - (1 - keep / of)) > 1e-9
        ),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"pattern {keep}:{of} {why}")
