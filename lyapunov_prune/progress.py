"""Progress with an estimate, on stderr, silent when it is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
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


def _console() -> Console:
    # Bound to today's stderr: what redirects sys.stderr later does not take the bar along.
    return Console(file=sys.stderr)


def track(items: Iterable[T], description: str) -> Iterable[T]:
    """Iterate over `items` under a progress bar that disappears at the end."""
    console = _console()
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


@contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner with `message` while the block runs."""
    console = _console()
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield
