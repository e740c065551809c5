"""Write the tables of methods, schedules and studies into the documents: `make tables`.

A document asks for one by `<!-- methods -->`; what stands up to the next `<!-- end -->` is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.ranking.criteria import CRITERIA
from lyapunov_prune.sensitivity.table import STUDIES

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TABLES: dict[str, Mapping[str, Any]] = {
    "criteria": CRITERIA,
    "methods": METHODS,
    "schedules": SCHEDULES,
    "studies": STUDIES,
}
_ASKED = re.compile(rf"(<!-- ({'|'.join(TABLES)}) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(table: Mapping[str, Any]) -> str:
    """Name, help and reference of every entry."""
    cells = [("name", "does", "from"), ("---", "---", "---")]
    cells += [(f"`{name}`", entry.help, entry.reference) for name, entry in table.items()]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in cells)


def filled(text: str) -> str:
    """A document with its tables as the code has them."""
    return _ASKED.sub(lambda asked: asked[1] + markdown(TABLES[asked[2]]) + asked[3], text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
