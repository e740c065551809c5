"""How results appear on stdout: a table on a terminal, plain text elsewhere."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lyapunov_prune.cli.failures import printing, tell
from lyapunov_prune.errors import printable
from lyapunov_prune.progress import end_status, is_main

if TYPE_CHECKING:  # a usage error must not wait for torch
    from lyapunov_prune.results.frames import pd
    from lyapunov_prune.results.result import Result


def speak_any_language() -> None:
    """A stdout of few letters (Latin-1) shows the others as escapes: a table has Greek ones."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(message: str) -> None:
    if is_main():
        end_status()
        with printing():
            print(_lines(message), flush=True)


def note(message: str) -> None:
    """Print a message that is not a result, on stderr."""
    if is_main():
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


_FOLDED = 20  # columns of a console that a text keeps at least, where it cannot have as many as it is long


def _print_table(frame: pd.DataFrame) -> None:
    """A table on a terminal, plain text elsewhere.

    One wider than the terminal is printed in blocks of columns, each begun by those that tell the rows apart: no number
    and no header is cut, and text goes on in the next line.
    """
    end_status()
    from lyapunov_prune.results.result import MISSING, table_text

    console = Console()
    if not console.is_terminal:
        say(table_text(frame))
        return
    header = [str(name) for name in frame.columns]
    numbers = [dtype.kind in "if" for dtype in frame.dtypes]
    rows = [
        tuple(
            MISSING if v is None or v != v else f"{v:.4g}" if isinstance(v, float) else printable(str(v)) for v in row
        )
        for row in frame.itertuples(index=False)
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
