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

from benchmarks import results
from experiments import differences
from lyapunov_prune.cli.options import one_of
from lyapunov_prune.registry import Registry

TABLES = pytest.mark.parametrize("table", tables.TABLES.values(), ids=tables.TABLES)


@TABLES
def test_every_entry_says_in_a_line_what_it_does_and_where_it_is_from(table: Mapping[str, Any]) -> None:
    for entry in table.values():
        assert 0 < len(entry.help) <= 70
        assert not entry.help.endswith(".")
        assert 0 < len(entry.reference) <= 80
    assert len({entry.help for entry in table.values()}) == len(table)


@TABLES
def test_a_class_has_the_name_of_its_row(table: Mapping[str, Any]) -> None:
    assert isinstance(table, Registry)
    assert [entry.name for entry in table.values()] == list(table)


@TABLES
def test_the_help_of_an_option_gives_every_entry_a_line(table: Mapping[str, Any]) -> None:
    assert one_of(table)["help"].split("\n\n") == [f"{name}: {entry.help}" for name, entry in table.items()]


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_documents_show_the_tables_of_the_code(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert tables.filled(text) == text, "run `make tables`"


def test_every_table_is_shown_somewhere() -> None:
    texts = "".join(document.read_text(encoding="utf-8") for document in tables.DOCUMENTS)
    assert all(f"<!-- {name} -->\n| name |" in texts for name in tables.TABLES)


def test_planted_fault_a_table_that_parted_is_seen() -> None:
    text = tables.filled("a\n<!-- studies -->\n<!-- end -->\nb\n")
    assert "| `removal` | each layer removed |" in text
    assert tables.filled(text.replace("each layer removed", "each layer doubled")) == text


# Numbers with decimals that are no measurements of ours: versions, names of models, settings, what a paper prints.
NAMES = (
    r"Python (?:≥ )?[\d.]+(?: to [\d.]+)?|transformers [\d.]+|ERNIE [\d.]+|Qwen-?[\d.]+|§[\d.]+|arxiv.org/abs/[\d.]+|"
    r"arXiv:[\d.]+|Wanda; [\d.]+ to [\d.]+|qwen2\.5-coder-1\.5b|Coder-1\.5B-Instruct|"
    r"(?<!\*)\*−?[\d.,]+\*(?!\*)"  # in italics: what a paper prints
)
PAPERS = r"The paper reports −0.44|its −0.44"


def outside(text: str) -> str:
    """A document without what stands between markers, in blocks of code and in spans of code."""
    text = re.sub(r"<!-- [^\n]+? -->\n?.*?<!-- end -->", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def loose_numbers(text: str) -> list[str]:
    """The numbers with decimals that stand in the sentences of a document."""
    return re.findall(r"(?<![\w.])\d[\d,]*\.\d+", re.sub(f"{NAMES}|{PAPERS}", "", outside(text)))


def loose_tables(text: str) -> list[str]:
    """The tables outside of markers that have a cell which begins with a number with decimals."""
    found = re.findall(r"(?:^\|.*\n)+", outside(text), re.MULTILINE)
    return [table for table in found if re.search(r"\| \**[+−-]?[\d,]+\.\d", table)]


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_measured_numbers_are_written_by_a_command(document: Path) -> None:
    name = document.relative_to(tables.REPOSITORY).as_posix()
    text = document.read_text(encoding="utf-8")
    if name != "docs/families.md":  # written by tests/families/verdicts.py
        assert not loose_tables(text)
        assert not loose_numbers(text)


def test_planted_fault_a_table_written_by_hand_is_seen() -> None:
    by_hand = "| model | perplexity |\n| --- | --- |\n| dense | 14.45 |\n"
    assert loose_tables(f"text\n\n{by_hand}\nmore\n") == [by_hand]
    assert loose_tables(f"<!-- methods -->\n{by_hand}<!-- end -->\n") == []


def test_planted_fault_a_number_in_a_sentence_is_seen() -> None:
    sentence = "With Python ≥ 3.10 and `--alpha 0.5` ρ reads 1.02 (§6.5)."
    assert loose_numbers(sentence) == ["1.02"]
    assert loose_numbers("Dense: <!-- methods:dense -->14.5<!-- end -->, *2.5* in the paper, **3.5** nowhere.") == [
        "3.5"
    ]


def test_planted_fault_a_number_that_parted_from_its_json_is_seen() -> None:
    document = tables.HOMES["methods"].parent / "README.md"
    text = document.read_text(encoding="utf-8")
    assert "22.9" in text
    assert tables.filled(text.replace("22.9", "21.9")) == text
    with pytest.raises(KeyError):
        tables.filled("<!-- methods:nothing -->\n<!-- end -->\n")


def test_a_number_in_a_sentence_can_be_a_cell_of_a_table() -> None:
    asked = "At eight ρ leaves <!-- progressive_removal:removal | 8 | rho -->{}<!-- end -->."
    assert tables.filled(asked.format("1.5")) == asked.format("313")
    table = "| a | b | c |\n| --- | --- | --- |\n| x \\| y | 1 | 2 |\n| x | 3 | 4 |\n| x | 5 | 6 |\n"
    assert [tables.cell(table, *place) for place in [("x", "c"), ("x", "5", "c"), ("x \\| y", "b")]] == ["4", "6", "1"]
    for place in [("z", "c"), ("x", "d")]:
        with pytest.raises(KeyError):
            tables.cell(table, *place)


def test_what_differs_from_a_paper_is_listed_under_its_section() -> None:
    items = "- **Agrees:** no.\n- **Differs:** one <!-- a:b -->2.5<!-- end -->\n  goes on.\n- other\n"
    items += "- **Put right:** two.\n"
    page = f"# A\n\n## B\n\n{items}\n## C\n"
    assert differences.sections(page) == {"B": ["one 2.5 goes on.", "*Put right:* two."]}


def test_every_statement_that_differs_or_puts_right_is_in_the_list() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in tables.EXPERIMENTS.glob("*/README.md"))
    found = differences.written()
    assert (pages.count("- **Differs:**"), pages.count("- **Put right:**")) == (
        int(found["differs"]),
        int(found["put-right"]),
    )


def private_paths(text: str) -> list[str]:
    """Strings of a JSON text that are paths of a machine; the hashes of a text, which may begin alike, are longer."""
    return re.findall(r'"((?:/|~|[A-Za-z]:\\\\)[^"]{,300})"', text)


COMMITTED = [*tables.EXPERIMENTS.rglob("*.json"), *(tables.REPOSITORY / "benchmarks").glob("*.json")]


def test_committed_results_name_no_folder_of_a_machine() -> None:
    named = {path: private_paths(path.read_text(encoding="utf-8")) for path in COMMITTED}
    assert not {path: found for path, found in named.items() if found}


def test_planted_fault_a_path_in_a_result_is_seen() -> None:
    assert private_paths('{"text": "/home/me/a.txt", "b": "C:\\\\me", "c": "and/or", "d": "b/c.txt"}') == [
        "/home/me/a.txt",
        "C:\\\\me",
    ]


def test_a_marker_within_a_sentence_is_filled_there() -> None:
    text = "Dense: <!-- methods:dense -->1.2<!-- end -->, and more.\n"
    assert tables.filled(text) == "Dense: <!-- methods:dense -->14.5<!-- end -->, and more.\n"


def test_a_ratio_over_its_limit_is_shown_as_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "HERE", tmp_path)
    for command in results.COMMANDS:
        benchmark = results.Benchmark(command)
        benchmark.add("a", "b", 0.5004, 1.0)
        benchmark.add("c", "d", 1.003, 1.0)
        benchmark.save()
    found = results.written()
    assert "| a | b | 0.5 | 1.00 |\n| c | d | 1 | 1.00, **missed** |\n" in found["ratios"]
    assert "- `benchmarks/run.py`: one run of benchmarks/run.py; " in found["source"]


def test_a_row_of_a_whole_command_replaces_its_earlier_one_and_a_tool_that_cannot_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "HERE", tmp_path)
    for row in (
        results.Row("m", "a", 1.0, 1.0, 1.0),
        results.Row("m", "b", said="it cannot"),
        results.Row("m", "a", 30.0, 2.0, 10.0, "3 to 5", (1.25, 1.2, 1.3)),
        results.Row("m", "c", 30.0, 2.0, None, "3 to 5", (1.25, 1.2, 1.3)),
    ):
        results.save_row(row, "a text")
    assert results.rows_of("m", "a text")["c"].removed == "3 to 5"
    assert not results.rows_of("m", "another text")
    assert results.written()["whole"].splitlines()[2:] == [
        "| m | a | 30 s | 20 s | 1.50 | 3 to 5 | 1.25 (1.2–1.3) |",
        "| m | b | cannot: it cannot | — | — | — | — |",
        "| m | c | 30 s | — | — | 3 to 5 | 1.25 (1.2–1.3) |",
    ]


def test_a_marker_within_a_sentence_begins_no_line() -> None:
    """Such a line would be a block of HTML, and shown as it is."""
    for document in tables.DOCUMENTS:
        assert not re.findall(r"^ *<!-- [^\n]+? -->(?=.)", document.read_text(encoding="utf-8"), re.MULTILINE), document


def test_the_tables_need_no_torch() -> None:
    script = "import sys, tables; assert not {'torch', 'numpy', 'pandas'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(tables.__file__).parent)
