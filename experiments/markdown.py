"""Tables of Markdown, for what experiments write into documents (`written` of their run.py, `make tables`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; numbers of three digits, what is missing as a dash."""
    lines = [list(head), ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def interval(value: float, low: float, high: float) -> str:
    """A number, and its interval behind it where it has one."""
    return cell(value) if math.isnan(low) else f"{cell(value)} ({cell(low)}–{cell(high)})"


def cell(value: object) -> str:
    """Text as it is; integers with commas; other numbers with three digits, or whole; None and NaN as a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "—"
    if isinstance(value, bool | str):
        return str(value).replace("|", "\\|")
    if isinstance(value, int):
        return f"{value:,}"
    number = float(value)  # type: ignore[arg-type]
    if number != 0 and not 1e-3 <= abs(number) < 1e6:
        return f"{number:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if number == 0 or abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:#.3g}".removesuffix(".")
