"""Measured once: what a file holds is taken for the answer only where it was asked exactly the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lyapunov_prune.results.result import ASKED, MeasuredOn, Result, encode

R = TypeVar("R", bound=Result)


def once(
    path: str | Path,
    kind: type[R],
    origin: MeasuredOn,
    parameters: Mapping[str, Any],
    measure: Callable[[], R],
    *,
    resume: bool = True,
) -> R:
    """The result at `path` if it was measured on `origin` with exactly these `parameters`, else a new one, kept there.

    `parameters` holds all that the numbers depend on beside the model and its tokens: method, ε, seeds, temperature,
    what was done to the model. They stand in the file, under `asked`. A file that was asked anything else, or does not
    say what, is replaced: `path` must be a name that the caller shares with nobody. Without `resume` nothing is read.
    """
    path = Path(path)
    asked = json.loads(json.dumps(encode({"origin": replace(origin, fingerprint=None), **parameters})))
    if resume and _asked(path) == asked:
        return kind.load(path)
    result = measure()
    result.save(path, asked)
    return result


def _asked(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))[ASKED]
    except (OSError, ValueError, KeyError, TypeError):  # none, half of one, or one that `once` did not write
        return None
