"""Measure once: reuse a result file if all parameters are the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.files import parsed
from lyapunov_prune.results.result import ASKED, MeasuredOn, Result

R = TypeVar("R", bound=Result)


def once(
    path: str | Path,
    kind: type[R],
    origin: MeasuredOn,
    parameters: Mapping[str, Any],
    measure: Callable[[], R],
    *,
    shared: bool = False,
) -> R:
    """The result at `path` if it was measured on `origin` with exactly these `parameters`, else a new one, saved there.

    `parameters` holds everything the numbers depend on besides the model and its tokens: method, ε, seeds, temperature,
    changes of the model. They are stored in the file under `asked`. A file with other or unknown parameters is
    replaced, so `path` must not be used by others. If it is (`shared`), such a file raises LyapunovPruneError before
    anything is measured.
    """
    path = Path(path)
    asked = json.loads(json.dumps(encode({"origin": replace(origin, fingerprint=None, short=None), **parameters})))
    same = _asked(path) == asked
    if shared and path.exists() and not same:
        raise LyapunovPruneError(
            f"{path} was measured with other settings, on other text or on another model, and would be replaced; rank "
            "it as it is (rank FILE), or give another --output"
        )
    if same:
        return kind.load(path)
    result = measure()
    result.save(path, asked)
    return result


def _asked(path: Path) -> Any:
    try:
        return parsed(path.read_text(encoding="utf-8"))[ASKED]
    except (OSError, ValueError, KeyError, TypeError):  # missing, incomplete, or not written by `once`
        return None
