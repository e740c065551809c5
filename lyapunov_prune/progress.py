"""Progress with an estimate, on stderr, silent when it is not a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")


def track(items: Iterable[T], description: str) -> Iterable[T]:
    """Iterate over `items` under a progress bar that disappears at the end."""
    console = Console(stderr=True)
    total = len(items) if isinstance(items, Sized) else None
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield from bar.track(items, total=total, description=description)
