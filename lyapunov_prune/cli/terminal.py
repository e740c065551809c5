"""How results appear on stdout: a table on a terminal, plain text elsewhere."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lyapunov_prune.cli.failures import printing, tell
from lyapunov_prune.cli.following import following
from lyapunov_prune.errors import CheckFailed, printable
from lyapunov_prune.progress import end_status, is_main, is_muted, muted

if TYPE_CHECKING:  # a usage error must not wait for torch
    from lyapunov_prune.results.frames import pd
    from lyapunov_prune.results.result import Result


def speak_any_language() -> None:
    """A stdout of few letters (Latin-1) shows the others as escapes: a table has Greek ones."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@dataclass
class _Screen:
    """What a command has shown so far, and the command to give next, where it knows better than `following`."""

    lines: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    next: str | None = None


_screen = _Screen()


@contextmanager
def screen(command: str, values: Mapping[str, Any], *, as_json: bool, quiet: bool) -> Iterator[None]:
    """Within the block a command runs; then its conclusion is said, and the command to give next.

    With `as_json` one JSON document is all of stdout, and what else is said goes to stderr. `quiet` mutes notes and
    progress, and with `as_json` all that is said.
    """
    global _screen
    _screen = shown = _Screen()
    failed, elsewhere = None, io.StringIO() if quiet else sys.stderr
    with muted(quiet), redirect_stdout(elsewhere) if as_json else nullcontext():
        try:
            yield
        except CheckFailed as error:  # what was measured is worth seeing
            failed = error
        measured = next((each for each in reversed(shown.results) if each.against_dense() is not None), None)
        ratio = None if measured is None else measured.against_dense()
        if measured is not None:
            say(measured.conclusion())
        if shown.next is None and failed is None:
            shown.next = following(command, values, ratio) or next(
                filter(None, (result.following() for result in reversed(shown.results))), ""
            )
        if shown.next:
            say(f"Next: lyapunov-prune {shown.next}")
    if as_json and is_main():
        from lyapunov_prune.results.encoding import encode

        document = {
            "command": command,
            "lines": shown.lines,
            "ratio": None if ratio is None else {**ratio._asdict(), "means": ratio.means()},
            "results": [result.to_json() for result in shown.results],
            "written": shown.written,
            "next": f"lyapunov-prune {shown.next}" if shown.next else None,
            "failed": None if failed is None else failed.message,
        }
        with printing():
            print(json.dumps(encode(document), indent=1, allow_nan=False), flush=True)
    if failed is not None:
        raise failed


def follow(command: str) -> None:
    """Name the command to give next; none if it is empty."""
    _screen.next = command


def say(message: str) -> None:
    _screen.lines += message.split("\n")
    if is_main():
        end_status()
        with printing():
            print(_lines(message), flush=True)


def note(message: str) -> None:
    """Print a message that is not a result, on stderr."""
    if is_main() and not is_muted():
        tell(_lines(message))


def _lines(message: str) -> str:
    """`message`, whose lines are its own: whatever else a terminal would obey is shown as its escape."""
    return "\n".join(map(printable, message.split("\n")))


def show(
    result: Result, written: Path | None, *, kept: Path | None = None, full: bool = False, answered: bool = False
) -> None:
    """The answer of `result`, then its table: the rows that matter, or with `full` what was measured and every row.

    `kept` is the file that holds the result, where that is not `written`. A result that no file holds has every row.

    Without the answer where it was `answered` before, as part of another result.
    """
    _screen.results.append(result)
    if written is not None:
        _screen.written.append(str(written))
    if not is_main():
        return
    lines = [] if answered else result.answer()
    if full:
        lines += [line for line in result.headline().split("\n") if line not in lines]
    if lines:
        say("\n".join(lines))
    kept = kept or (written if written is not None and written.suffix == ".json" else None)
    brief = kept is not None and not full
    _print_table(result.brief() if brief else result.summary())
    if brief and (unshown := result.unshown(f"lyapunov-prune report {shlex.quote(str(kept))} shows all")):
        say(unshown)
    if written is not None:
        say(f"Written: {written}{_sized(written)}")
    if written is not None and written.suffix == ".gguf":
        file = shlex.quote(str(written))
        say(f"Run it: llama-cli -m {file}, or: echo FROM {file} > Modelfile && ollama create my-model -f Modelfile")


def _sized(written: Path) -> str:
    """For a checkpoint that was written, its size in brackets."""
    if not (written.is_dir() or written.suffix == ".gguf"):
        return ""
    from lyapunov_prune.models.size import stored_size

    size = stored_size(written)
    return "" if size is None else f" ({size.told()})"


def keep(run: Path, name: str, result: Result) -> None:
    """Save `result` under its name in `run`, and show it."""
    show(result, result.save(run / f"{name}.json"))


_WIDE = 120  # characters of a line where there is no terminal
_FOLDED = 20  # columns of a console that a text keeps at least, where it cannot have as many as it is long


def _print_table(frame: pd.DataFrame) -> None:
    """A table on a terminal, plain text elsewhere.

    One wider than the terminal is printed in blocks of columns, each begun by those that tell the rows apart: no number
    and no header is cut, and text goes on in the next line.
    """
    end_status()
    from lyapunov_prune.results.result import MISSING, table_text
    from lyapunov_prune.results.wording import number

    console = Console()
    if not console.is_terminal:
        text = table_text(frame)
        if max(map(len, text.split("\n"))) <= _WIDE:
            say(text)
            return
        console = Console(width=_WIDE)
    header = [str(name) for name in frame.columns]
    numbers = [dtype.kind in "if" for dtype in frame.dtypes]
    rows = [
        tuple(MISSING if v is None else number(v) if isinstance(v, float) else printable(str(v)) for v in row)
        for row in frame.astype(object).where(frame.notna(), None).itertuples(index=False)
    ]
    longest = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
    widths = [
        long if number else max(cell_len(name), min(long, _FOLDED))
        for name, long, number in zip(header, longest, numbers, strict=True)
    ]
    tables = []
    for block in _blocks([width + 2 for width in widths], _key(rows), console.width):  # 2: around a cell
        table = Table(box=None, header_style="bold")
        for c in block:
            table.add_column(
                header[c],
                justify="right" if numbers[c] else "left",
                min_width=cell_len(header[c]),
                no_wrap=numbers[c],
                overflow="fold",
            )
        for row in rows:
            table.add_row(*(Text(row[c]) for c in block))
        tables.append(table)
    with printing():
        for table in tables:
            console.print(table)


def _key(rows: list[tuple[str, ...]]) -> int:
    """How many of the first columns tell all rows apart; 1 if even all of them do not."""
    columns = len(rows[0]) if rows else 1
    return next((n for n in range(1, columns) if len({row[:n] for row in rows}) == len(rows)), 1)


def _blocks(widths: list[int], key: int, room: int) -> list[list[int]]:
    """The columns of these widths in blocks, each the first `key` and as many of the others as `room` holds."""
    blocks = [list(range(key))]
    for column in range(key, len(widths)):
        if len(blocks[-1]) > key and sum(widths[c] for c in (*blocks[-1], column)) > room:
            blocks.append(list(range(key)))
        blocks[-1].append(column)
    return blocks
