"""The size that is asked for, in bytes of tensors."""

from __future__ import annotations

import re
from contextlib import suppress

from lyapunov_prune.errors import LyapunovPruneError

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_WRITTEN = re.compile(r"([\d.]+)\s*(%|bpw|[KMG]i?B)", re.IGNORECASE)


def parsed_size(size: str) -> tuple[float, str]:
    """The number and the unit, in capitals, of `size`. Raises LyapunovPruneError for another word."""
    found = _WRITTEN.fullmatch(size.strip())
    with suppress(ValueError):
        if found and (value := float(found[1])) > 0:
            return value, found[2].upper()
    raise LyapunovPruneError(f"{size!r} is no size; write it as 300MB, 50% or 4.5bpw")


def bytes_for(size: str, weights: int, head: int) -> int:
    """The bytes of tensors that `size` leaves a model of so many weights: `300MB`, `50%` or `4.5bpw`.

    A number of bytes is of the whole file, from which its `head` goes; a share is of the weights in 16 bits; `bpw` is
    bits a weight. Raises LyapunovPruneError as `parsed_size` does, and for a size that is no smaller than 16 bits.
    """
    value, unit = parsed_size(size)
    dense = 2 * weights
    room = {"%": value / 100 * dense, "BPW": value * weights / 8}.get(unit, value * _UNITS.get(unit, 0) - head)
    if room >= dense:
        raise LyapunovPruneError(
            f"{size} is no smaller than the model, which takes {(dense + head) / 1e6:.4g} MB in 16 bits; give less, or "
            "export it"
        )
    return int(room)
