"""Progress with an estimate, on stderr, silent when it is not a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")


def _console() -> Console:
    # Bound to today's stderr: what redirects sys.stderr later does not take the bar along.
    return Console(file=sys.stderr)


def process() -> str:
    """The number of this process among those that `accelerate launch` started; a RANK without others is no number."""
    return os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else "0"


def is_main() -> bool:
    """Whether this is the process that speaks and writes, of those that `accelerate launch` started."""
    return process() == "0"


def track(items: Iterable[T], description: str, cost: Callable[[T], float] | None = None) -> Iterable[T]:
    """Iterate over `items` under a progress bar that disappears at the end.

    `cost` says how long an item takes beside the others, which the estimate of the time left follows.
    """
    console = _console()
    items = list(items) if cost else items
    total = sum(map(cost, items)) if cost else len(items) if isinstance(items, Sized) else None
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn() if cost else MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (console.is_terminal and is_main()),
    )
    with bar:
        task = bar.add_task(description, total=total)
        for item in items:
            yield item
            bar.advance(task, cost(item) if cost else 1)


@contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner with `message` while the block runs."""
    console = _console()
    if not (console.is_terminal and is_main()):
        yield
        return
    with console.status(message):
        yield


def warn(message: str) -> None:
    """A line on stderr while long work goes on, terminal or not."""
    if is_main():
        with suppress(OSError):  # a stderr that is full or closed ends no work
            _console().print(f"warning: {message}", markup=False, highlight=False, soft_wrap=True)
