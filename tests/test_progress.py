"""Progress: what passes through, what the bar is told, and who is allowed to speak."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from lyapunov_prune import progress
from lyapunov_prune.progress import is_main, phases, status, track, warn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A stderr that is a terminal."""
    found = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The total and every advance that the bar is told."""
    calls: list[tuple[str, Any]] = []

    class Bar(progress.Progress):
        def add_task(self, description: str, *args: Any, **options: Any) -> Any:
            calls.append((description, options["total"]))
            return super().add_task(description, *args, **options)

        def advance(self, task_id: Any, advance: float = 1) -> None:
            calls.append(("advance", advance))
            super().advance(task_id, advance)

    monkeypatch.setattr(progress, "Progress", Bar)
    return calls


def test_every_item_passes_once_in_order() -> None:
    assert list(track([3, 1, 2], "x")) == [3, 1, 2]
    assert list(track([3, 1, 2], "x", cost=float)) == [3, 1, 2]
    assert list(track(iter("ab"), "x")) == ["a", "b"]
    assert list(track(iter("ab"), "x", cost=lambda item: 2)) == ["a", "b"]
    assert list(track([], "x", cost=float)) == []


def test_the_bar_counts_items(told: list[tuple[str, Any]]) -> None:
    list(track([3, 1], "items"))
    assert told == [("items", 2), ("advance", 1), ("advance", 1)]


def test_the_bar_follows_the_cost(told: list[tuple[str, Any]]) -> None:
    list(track(iter([3, 1, 2]), "jobs", cost=lambda item: 10 * item))
    assert told == [("jobs", 60), ("advance", 30), ("advance", 10), ("advance", 20)]


def test_an_item_counts_when_it_is_done(told: list[tuple[str, Any]]) -> None:
    items = iter(track([1, 2], "x"))
    next(items)
    assert told == [("x", 2)]
    next(items)
    assert told == [("x", 2), ("advance", 1)]


def test_a_length_that_is_not_known_is_no_error(told: list[tuple[str, Any]]) -> None:
    list(track(iter([1]), "x"))
    assert told[0] == ("x", None)


def test_a_terminal_sees_the_bar_and_it_disappears(terminal: Terminal) -> None:
    list(track([1, 2], "measuring", cost=float))
    assert "measuring" in terminal.getvalue()
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")  # the line is erased


def test_only_the_main_process_speaks(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_main()
    monkeypatch.setenv("RANK", "0")
    assert is_main()
    monkeypatch.setenv("RANK", "1")
    assert is_main()  # a scheduler's, that started no others
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_main()
    assert list(track([1, 2], "measuring")) == [1, 2]
    with status("waiting"):
        pass
    assert "measuring" not in terminal.getvalue()
    assert "waiting" not in terminal.getvalue()


def test_what_is_no_terminal_sees_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with status("waiting"):
        list(track([1, 2], "measuring"))
    assert capsys.readouterr() == ("", "")


def test_a_log_has_a_line_once_a_step_is_long_then_every_minute_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "_LONG", 10.0)
    monkeypatch.setattr(progress, "_AGAIN", 60.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(progress, "_last_line", 0.0)
    for _ in track(range(10), "outer"):
        for _ in track([1, 2], "inner"):
            now += 10.0
    now = 1000.0
    list(track([1], "short"))
    for _ in track([1], "long at its end"):
        now += 10.0
    with status("loading"):
        now += 41.0
    with status("waiting"), status("what the log has"):
        now += 41.0
    assert capsys.readouterr().err.splitlines() == [
        "outer: 0/10, 10 s",
        "outer: 3/10, 1:10, 2:43 left",
        "outer: 6/10, 2:10, 1:26 left",
        "outer: 9/10, 3:10, 21 s left",
        "outer: 10/10, 3:20",
        "short: 1/1, 0 s",
        "long at its end: 1/1, 10 s",
        "loading: 41 s",
        "what the log has: 41 s",
    ]


def test_muted_progress_says_nothing_but_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LONG", 0.0)
    with progress.muted(True):
        list(track([1, 2], "measuring"))
        warn("careful")
    list(track([1, 2], "measuring"))
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "warning",
        "measuring",
        "measuring",
    ]


def test_the_block_of_a_status_runs(terminal: Terminal) -> None:
    with pytest.raises(RuntimeError, match="planted"), status("waiting"):
        raise RuntimeError("planted")
    assert "waiting" in terminal.getvalue()


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0 s"), (7.9, "7 s"), (60, "1:00"), (105, "1:45"), (7265, "2:01:05")]
)
def test_a_duration_is_short(seconds: float, told: str) -> None:
    assert progress._duration(seconds) == told


@pytest.mark.parametrize(("left", "told"), [(105, "7 s, 1:45 left"), (None, "7 s")])
def test_a_bar_says_what_it_took_and_what_is_left(left: float | None, told: str) -> None:
    task: Any = SimpleNamespace(finished=False, elapsed=7.2, time_remaining=left)
    assert progress._Times().render(task).plain == told


def test_phases_are_counted_in_the_bars(told: list[tuple[str, Any]]) -> None:
    with phases(3) as begin:
        begin()
        list(track([], "one"))
        begin()
        list(track([], "two"))
    list(track([], "three"))
    assert [name for name, _ in told] == ["1 of 3: one", "2 of 3: two", "three"]


@pytest.mark.parametrize(
    "other", [lambda: list(track([1], "measuring")), lambda: warn("careful"), lambda: run_status("second")]
)
def test_a_spinner_ends_where_something_else_is_shown(other: Any, terminal: Terminal) -> None:
    with status("first"):
        assert progress._spinner is not None
        other()
        assert progress._spinner is None


def run_status(message: str) -> None:
    with status(message):
        pass


class Notebook:
    """The displays of a notebook by name, and whether each call updates one that is there."""

    def __init__(self) -> None:
        self.shell = SimpleNamespace(execution_count=1)
        self.shown: dict[str, list[str]] = {}

    def show(self, data: dict[str, str], *, raw: bool, display_id: str, update: bool) -> None:
        assert raw
        assert update == (display_id in self.shown)
        self.shown.setdefault(display_id, []).append(data["text/plain"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """The process is the kernel of a notebook, and every state of a bar is shown."""
    found = Notebook()
    module = SimpleNamespace(get_ipython=lambda: found.shell, display=SimpleNamespace(display=found.show))
    monkeypatch.setitem(sys.modules, "IPython", cast(Any, module))
    monkeypatch.setattr(progress, "_console", lambda: Console(file=io.StringIO(), force_jupyter=True))
    monkeypatch.setattr(progress, "_cell", progress._CellLine())
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    return found


def test_all_bars_of_a_cell_share_one_line_that_is_empty_at_the_end(notebook: Notebook) -> None:
    with status("loading"):
        pass
    for name in ("first", "second"):
        list(track([1, 2], name))
    (lines,) = notebook.shown.values()
    assert lines[0] == "loading"
    assert ["first" in line for line in lines].count(True) == 2
    assert "2/2" in lines[-2]
    assert lines[-1] == ""
    notebook.shell.execution_count = 2
    list(track([1], "third"))
    assert len(notebook.shown) == 2


def test_a_notebook_is_told_now_and_then(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY", 1e9)
    monkeypatch.setattr(progress._cell, "_told", -2e9)
    for name in ("first", "second"):
        list(track(range(100), name))
    (lines,) = notebook.shown.values()
    assert len([line for line in lines if line]) == 1
    assert lines[-1] == ""


def test_what_ends_early_leaves_no_line(notebook: Notebook) -> None:
    with pytest.raises(RuntimeError, match="planted"), status("waiting"):
        raise RuntimeError("planted")
    for _ in track([1, 2], "measuring"):
        break
    assert [lines[-1] for lines in notebook.shown.values()] == [""]


def test_only_the_main_process_speaks_in_a_notebook(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "is_main", lambda: False)
    list(track([1, 2], "measuring"))
    assert notebook.shown == {}
