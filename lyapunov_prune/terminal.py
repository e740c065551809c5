"""How results appear on stdout: a table on a terminal, plain text or JSON elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from lyapunov_prune.progress import is_main

if TYPE_CHECKING:  # a usage error must not wait for pandas
    from lyapunov_prune.results import Result


def say(message: str) -> None:
    if is_main():
        print(message, flush=True)


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
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row))
    console.print(result.headline(), highlight=False)
    console.print(table)
