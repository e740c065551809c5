"""Every table of choices: its help, its references, its functions, and the documents that show it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tables

from lyapunov_prune.allocation import schedules
from lyapunov_prune.cli.options import one_of
from lyapunov_prune.compression import methods
from lyapunov_prune.merging import reductions
from lyapunov_prune.sensitivity import studies

TABLES = pytest.mark.parametrize("table", tables.TABLES.values(), ids=tables.TABLES)
FUNCTIONS = {
    "methods": methods._FUNCTIONS,
    "reductions": reductions._FUNCTIONS,
    "schedules": schedules._FUNCTIONS,
    "studies": studies._FUNCTIONS,
}


@TABLES
def test_every_entry_says_in_a_line_what_it_does_and_where_it_is_from(table: Mapping[str, Any]) -> None:
    for entry in table.values():
        assert 0 < len(entry.help) <= 70
        assert not entry.help.endswith(".")
        assert 0 < len(entry.reference) <= 80
    assert len({entry.help for entry in table.values()}) == len(table)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_has_a_name_has_a_function(name: str) -> None:
    assert list(FUNCTIONS[name]) == list(tables.TABLES[name])


@TABLES
def test_the_help_of_an_option_gives_every_entry_a_line(table: Mapping[str, Any]) -> None:
    assert one_of(table).split("\n\n") == [f"{name}: {entry.help}" for name, entry in table.items()]


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_documents_show_the_tables_of_the_code(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert tables.filled(text, tables.experiment_of(document)) == text, "run `make tables`"


def test_every_table_is_shown_somewhere() -> None:
    texts = "".join(document.read_text(encoding="utf-8") for document in tables.DOCUMENTS)
    assert all(f"<!-- {name} -->\n| name |" in texts for name in tables.TABLES)


def test_planted_fault_a_table_that_parted_is_seen() -> None:
    text = tables.filled("a\n<!-- studies -->\n<!-- end -->\nb\n")
    assert "| `removal` | each layer removed |" in text
    assert tables.filled(text.replace("each layer removed", "each layer doubled")) == text


# Tables of measured numbers that no command writes yet, and how many of them a document has at most.
PENDING = {
    "docs/speed.md": 1,  # `make bench` keeps no JSON
    "experiments/03_early_layer_cliff/README.md": 9,
    "experiments/09_allocation/README.md": 1,
    "experiments/10_within_layer/README.md": 9,
    "experiments/16_spaces/README.md": 9,
    "experiments/17_generation/README.md": 9,
    "experiments/18_candidates/README.md": 9,
    "experiments/19_prediction/README.md": 1,
}


def loose_tables(text: str) -> list[str]:
    """The tables outside of markers that have a cell which begins with a number with decimals."""
    outside = re.sub(r"<!-- [\w: -]+ -->\n.*?<!-- end -->", "", text, flags=re.DOTALL)
    return [t for t in re.findall(r"(?:^\|.*\n)+", outside, re.MULTILINE) if re.search(r"\| \**[+−-]?[\d,]+\.\d", t)]


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_table_of_measured_numbers_is_written_by_a_command(document: Path) -> None:
    name = document.relative_to(tables.REPOSITORY).as_posix()
    found = loose_tables(document.read_text(encoding="utf-8"))
    assert len(found) <= PENDING.get(name, 0), found


def test_planted_fault_a_table_written_by_hand_is_seen() -> None:
    by_hand = "| model | perplexity |\n| --- | --- |\n| dense | 14.45 |\n"
    assert loose_tables(f"text\n\n{by_hand}\nmore\n") == [by_hand]
    assert loose_tables(f"<!-- methods -->\n{by_hand}<!-- end -->\n") == []


def test_planted_fault_a_number_that_parted_from_its_json_is_seen() -> None:
    document = tables.EXPERIMENTS / "08_methods" / "README.md"
    text = document.read_text(encoding="utf-8")
    assert "22.9" in text
    assert tables.filled(text.replace("22.9", "21.9"), "08_methods") == text
    with pytest.raises(KeyError):
        tables.filled("<!-- 08_methods:nothing -->\n<!-- end -->\n")


def test_the_tables_need_no_torch() -> None:
    script = "import sys, tables; assert not {'torch', 'numpy', 'pandas'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(tables.__file__).parent)
