"""One section of the page: a file that a run may hold, and what is shown of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lyapunov_prune.results.result import Result


@dataclass(frozen=True)
class Section:
    """`file` holds a `kind`; `part` takes what is shown from it, None for nothing; `draw` gives names and SVG texts.

    With `in_folders` folders within the run are looked through for it too: it stands beside weights, or is of a command
    that leaves the run's own file alone. One that `leads` compares models before and after, and comes first.
    """

    file: str
    kind: type[Result]
    title: str
    words: str
    draw: Callable[[Any], dict[str, str]] = lambda r: {}
    in_folders: bool = False
    leads: bool = False
    part: Callable[[Any], Result | None] = lambda r: r

    def paths(self, run: Path) -> list[Path]:
        below = sorted(run.glob(f"*/{self.file}")) if self.in_folders else []
        return [path for path in (run / self.file, *below) if path.is_file()]
