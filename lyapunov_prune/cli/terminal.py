"""How results appear on stdout: a table on a terminal, plain text or JSON elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lyapunov_prune.errors import printable
from lyapunov_prune.progress import is_main

if TYPE_CHECKING:  # a usage error must not wait for pandas
    from lyapunov_prune.results.result import Result


def say(message: str) -> None:
    if is_main():
        print(_lines(message), flush=True)


def _lines(message: str) -> str:
    """`message`, whose lines are its own: whatever else a terminal would obey is shown as its escape."""
    return "\n".join(map(printable, message.split("\n")))


def show(result: Result, as_json: bool, written: Path | None, table: bool = True) -> None:
    if not is_main():
        return
    if as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
        return
    if table:
        _print_table(result)
    if written is not None:
        say(f"Written: {written}")


def _print_table(result: Result) -> None:
    """A table on a terminal, plain text elsewhere."""
    console = Console()
    if not console.is_terminal:
        say(str(result))
        return
    frame = result.summary()
    table = Table(box=None, header_style="bold")
    for name in frame.columns:
        table.add_column(name, justify="right" if frame[name].dtype.kind in "if" else "left")
    for row in frame.itertuples(index=False):
        table.add_row(*(Text(f"{v:.4g}" if isinstance(v, float) else printable(str(v))) for v in row))
    console.print(Text(_lines(result.headline())))  # text: in a string, [brackets] are rich's markup
    console.print(table)
