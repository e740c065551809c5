"""Write every table that comes from code or from committed measurements into the documents: `make tables`.

A document asks for one by `<!-- NAME -->`; what stands up to the next `<!-- end -->` is replaced: whole lines where
the marker ends its line, a number within a sentence where it does not. A bare name is that of a table of the code;
`<!-- progressive_removal:NAME -->` is what `written()` of that experiment's run.py returns by NAME, and the modules of
`MODULES` are asked alike. What an experiment has measured on another model than the built-in one lies in a folder by
the model's name: `<!-- EXPERIMENT:FOLDER NAME -->`. `<!-- EXPERIMENT:TABLE | ROW | COLUMN -->` asks for one cell.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.export.format import Format
from lyapunov_prune.export.table import FORMATS
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.models.table import READERS
from lyapunov_prune.ranking.table import CRITERIA
from lyapunov_prune.sensitivity.table import STUDIES

REPOSITORY = Path(__file__).resolve().parents[1]
EXPERIMENTS = REPOSITORY / "experiments"
HOMES = {path.parent.name: path.parent for path in sorted(EXPERIMENTS.glob("*/*/run.py"))}  # chapter, experiment
DOCUMENTS = [
    *sorted(EXPERIMENTS.glob("*/README.md")),  # first: docs/differences.md is made of them
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
TABLES: dict[str, Mapping[str, Any]] = {
    "criteria": CRITERIA,
    "formats": FORMATS,
    "methods": METHODS,
    "readers": READERS,
    "reductions": REDUCTIONS,
    "schedules": SCHEDULES,
    "studies": STUDIES,
}
MODULES = {
    "abstract": "experiments.abstract",
    "attacks": "attacks",
    "benchmarks": "benchmarks.results",
    "compared": "experiments.compared",
    "differences": "experiments.differences",
    "mutants": "mutants",
    "used_texts": "experiments.used_texts",
}
_ASKED = re.compile(r"(<!-- (?:(\w+):)?([\w., /-]+(?: \| [^|\n]+?)*) -->\n?)(.*?)(<!-- end -->)", re.DOTALL)


def markdown(table: Mapping[str, Any]) -> str:
    """Name, help and reference of every entry, of a format also who loads it and which commands write it."""
    entries = table.values()
    more = ("loaded by", "written by", "streamed by") if all(issubclass(e, Format) for e in entries) else ()
    cells: list[tuple[str, ...]] = [("name", "does", "from", *more), ("---",) * (3 + len(more))]
    for name, entry in table.items():
        cells.append((f"`{name}`", entry.help, entry.reference, *(_of_format(entry) if more else ())))
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in cells)


def module_of(experiment: str) -> str:
    """The name to import the run.py of an experiment by. Raises KeyError for an experiment that is not there."""
    return f"experiments.{HOMES[experiment].parent.name}.{experiment}.run"


def _of_format(entry: type[Format]) -> tuple[str, str, str]:
    wrote = {"prune": entry.card is not None, "compress": bool(entry.units), "export": entry.exports}
    return entry.readers, *(
        ", ".join(f"`{command}`" for command in commands) or "-"
        for commands in ([c for c, done in wrote.items() if done], entry.streamed)
    )


@functools.cache
def written(experiment: str, folder: Path | None = None) -> dict[str, str]:
    """What the run.py of an experiment, or the benchmarks, write of their committed results, by marker.

    Of the results in `folder` if given: those of one model.
    """
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    module = importlib.import_module(MODULES.get(experiment) or module_of(experiment))
    return module.written(folder) if folder else module.written()


def filled(text: str) -> str:
    """A document with its tables as code and measurements have them.

    Raises KeyError for a marker that nothing is written for.
    """

    def replaced(asked: re.Match[str]) -> str:
        head, of, name, _, end = asked.groups()
        found = _of_experiment(of, name) if of else markdown(TABLES[name])
        return head + (found if head.endswith("\n") else found.strip()) + end

    return _ASKED.sub(replaced, text)


def _of_experiment(experiment: str, name: str) -> str:
    """What a name stands for; its first word may be the folder of a model."""
    model, _, rest = name.partition(" ")
    folder = HOMES[experiment] / model if rest else None
    found, name = (written(experiment, folder), rest) if folder and folder.is_dir() else (written(experiment), name)
    name, *place = name.split(" | ")
    return cell(found[name], *place) if place else found[name]


def cell(table: str, *place: str) -> str:
    """What a Markdown table has in the row whose first cells are all of `place` but the last, under the column that is.

    Raises KeyError for a row or column that the table lacks.
    """
    head, _, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines())
    *first, column = place
    for row in rows:
        if row[: len(first)] == first and column in head:
            return row[head.index(column)]
    raise KeyError(place)


def refuse_burnt() -> None:
    """Raise SystemExit if a committed result reports on a text that was used to fit or to choose, or tells none."""
    sys.path.insert(0, str(REPOSITORY))
    if found := importlib.import_module("experiments.used_texts").faults():
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    refuse_burnt()
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
