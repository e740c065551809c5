"""Progress with an estimate, on stderr: on a terminal and in a notebook, silent elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
)
from rich.status import Status
from rich.text import Text

T = TypeVar("T")

_spinner: Status | None = None  # the one that turns now
_phase = ""  # what stands before the description of a bar


class _Times(ProgressColumn):
    """How long it has taken and will take, `7 s, 1:45 left`."""

    def render(self, task: Task) -> Text:
        elapsed = _duration(task.finished_time if task.finished else task.elapsed)
        left = "" if task.time_remaining is None else f", {_duration(task.time_remaining)} left"
        return Text(f"{elapsed}{left}", style="progress.elapsed")


def _duration(seconds: float | None) -> str:
    """`7 s`, `1:45`, or `2:01:05`."""
    whole = int(seconds or 0)
    hours, minutes = whole // 3600, whole // 60
    if not minutes:
        return f"{whole} s"
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _console() -> Console:
    # Bound to today's stderr: what redirects sys.stderr later does not take the bar along.
    return Console(file=sys.stderr)


def _shows(console: Console) -> bool:
    # In a notebook rich draws by ipywidgets, and without them it warns at every step.
    in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    return is_main() and (console.is_terminal or in_notebook)


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
        _Times(),
        console=console,
        transient=True,
        disable=not _shows(console),
    )
    end_status()
    with bar:
        task = bar.add_task(f"{_phase}{description}", total=total)
        for item in items:
            yield item
            bar.advance(task, cost(item) if cost else 1)


@contextmanager
def phases(of: int) -> Iterator[Callable[[], None]]:
    """A function that begins the next of so many phases: bars then say which one they belong to, `3 of 6: …`."""
    global _phase
    before, number = _phase, 0

    def begin() -> None:
        nonlocal number
        global _phase
        number += 1
        _phase = f"{before}{number} of {of}: "

    try:
        yield begin
    finally:
        _phase = before


@contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner with `message` while the block runs, until something else is shown."""
    global _spinner
    end_status()
    console = _console()
    if not _shows(console):
        yield
        return
    mine = _spinner = console.status(message)
    mine.start()
    try:
        yield
    finally:
        if _spinner is mine:
            end_status()


def end_status() -> None:
    """End the spinner, if one turns: call this before anything else is written to the terminal."""
    global _spinner
    if _spinner is not None:
        _spinner.stop()
        _spinner = None


def warn(message: str) -> None:
    """A line on stderr while long work goes on, terminal or not."""
    if is_main():
        end_status()
        with suppress(OSError):  # a stderr that is full or closed ends no work
            _console().print(f"warning: {message}", markup=False, highlight=False, soft_wrap=True)
