"""Progress with an estimate of the time left, on stderr: bars in terminals and notebooks, elsewhere a line a step."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.status import Status
from rich.text import Text

T = TypeVar("T")

_spinner: Status | None = None  # the active spinner
_waiting: object = None  # the active status where no spinner is shown
_phase = ""  # a prefix for the descriptions of bars
_EVERY = 0.5  # seconds between updates of a bar in a notebook
_LONG, _AGAIN = 10.0, 60.0  # seconds after which a step has its first line where there are no bars, and between lines
_PER_CENT = 10**5  # things from which on a line says their share
_muted = False


class _Times(ProgressColumn):
    """Elapsed and remaining time, as `7 s, 1:45 left`."""

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
    # The current stderr: redirecting sys.stderr later does not move the bar.
    return Console(file=sys.stderr)


def _shows(console: Console) -> bool:
    return is_main() and console.is_terminal and not _muted


def _logs(console: Console) -> bool:
    return is_main() and not (console.is_terminal or console.is_jupyter or _muted)


class _CellLine:
    """One line below the running notebook cell, shared by all bars of the cell.

    rich would draw every bar as a widget of its own, which leaves an empty space in the notebook.
    """

    def __init__(self) -> None:
        self._name = ""  # of the displayed line
        self._told = 0.0

    def show(self, line: str) -> None:
        if line and time.monotonic() < self._told + _EVERY:
            return
        from IPython import display, get_ipython

        shell: Any = get_ipython()
        name = f"lyapunov-prune-{shell.execution_count}"
        if line or name == self._name:
            self._told = time.monotonic()
            display.display({"text/plain": line}, raw=True, display_id=name, update=name == self._name)
            self._name = name


_cell = _CellLine()


def _tell_cell(line: str, console: Console) -> None:
    if console.is_jupyter and is_main():
        _cell.show(line)


def _drawn(bar: Progress) -> str:
    """`bar` as plain text."""
    page = Console(file=io.StringIO(), width=100, force_jupyter=False)
    with page.capture() as drawn:
        page.print(bar.get_renderable())
    return drawn.get().rstrip()


@contextmanager
def muted(wanted: bool) -> Iterator[None]:
    """Within the block nothing is shown but warnings, if that is `wanted`."""
    global _muted
    before, _muted = _muted, wanted or _muted
    try:
        yield
    finally:
        _muted = before


def is_muted() -> bool:
    return _muted


def several() -> bool:
    """Whether `accelerate launch` has started other processes beside this one."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def process() -> str:
    """This process' rank among those started by `accelerate launch`; "0" if it is alone, whatever RANK says."""
    return os.environ.get("RANK", "0") if several() else "0"


def is_main() -> bool:
    """Whether this process prints and writes, among those started by `accelerate launch`."""
    return process() == "0"


@dataclass
class _Step:
    """What a log says of a bar: lines where stderr is neither a terminal nor a notebook."""

    name: str
    total: float | None
    began: float
    done: float = 0.0
    told: float | None = None  # `done` when the last line was written

    def line(self, now: float) -> str:
        took, left, done = now - self.began, "", f"{self.done:g}"
        if self.total:
            few = self.total == int(self.total) < _PER_CENT
            done = f"{self.done:g}/{self.total:g}" if few else f"{self.done / self.total:.0%}"
            if 0 < self.done < self.total:
                left = f", {_duration(took / self.done * (self.total - self.done))} left"
        return f"{self.name}: {done}, {_duration(took)}{left}"


_steps: list[_Step] = []  # those at work, the outermost first
_last_line = time.monotonic()


def _log(line: str, now: float) -> None:
    global _last_line
    _last_line = now
    with suppress(OSError):  # a full or closed stderr must not end the work
        print(line, file=sys.stderr, flush=True)


def _log_step(*, ended: bool = False) -> None:
    """A line on the outermost step, once it is long, then every minute, and at its end."""
    now, step = time.monotonic(), _steps[0]
    long = now - step.began >= _LONG
    due = step.told != step.done if ended else step.told is None
    if (long and due) or now - _last_line >= _AGAIN:
        step.told = step.done
        _log(step.line(now), now)


def track(items: Iterable[T], description: str, cost: Callable[[T], float] | None = None) -> Iterable[T]:
    """Iterate over `items` under a progress bar that disappears at the end.

    `cost` is the relative duration of an item, used to estimate the time left.
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
    task = bar.add_task(f"{_phase}{description}", total=total)
    logs = _logs(console)
    step = _Step(f"{_phase}{description}", total, time.monotonic())
    _steps.append(step)
    try:
        with bar:
            for item in items:
                yield item
                done = cost(item) if cost else 1
                step.done += done
                bar.advance(task, done)
                if console.is_jupyter:
                    _tell_cell(_drawn(bar), console)
                if logs:
                    _log_step()
        if logs and step is _steps[0]:
            _log_step(ended=True)
    finally:
        _steps.remove(step)
        _tell_cell("", console)


@contextmanager
def phases(of: int) -> Iterator[Callable[[], None]]:
    """Yields a function that begins the next of `of` phases; bars then show their phase, as `3 of 6: …`."""
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
    """Show a spinner with `message` while the block runs, until something else is shown."""
    global _spinner, _waiting
    end_status()
    console = _console()
    if not _shows(console):
        _tell_cell(message, console)
        began, only = time.monotonic(), object()
        _waiting = only
        try:
            yield
        finally:
            _tell_cell("", console)
        now = time.monotonic()
        if _waiting is only and _logs(console) and now - began >= _LONG:
            _log(f"{message}: {_duration(now - began)}", now)
        return
    mine = _spinner = console.status(message)
    mine.start()
    try:
        yield
    finally:
        if _spinner is mine:
            end_status()


def end_status() -> None:
    """Stop the spinner, if there is one, before anything else is written to the terminal."""
    global _spinner, _waiting
    _waiting = None
    if _spinner is not None:
        _spinner.stop()
        _spinner = None


def warn(message: str) -> None:
    """Print a line to stderr during long work, in a terminal or not."""
    if is_main():
        end_status()
        with suppress(OSError):  # a full or closed stderr must not end the work
            _console().print(f"warning: {message}", markup=False, highlight=False, soft_wrap=True)
