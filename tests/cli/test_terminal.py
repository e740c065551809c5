"""What is shown: text, whatever names are in it."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from lyapunov_prune.cli import terminal
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError, printable
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import LayersGone
from lyapunov_prune.results.result import ROWS, ModelIdentity, Result

STRANGE = "a\x1b[2J\x1b]0;t\x07b\rc\u202e\u2028\x85d"


class Shown(Result):
    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"layer": [STRANGE, "[red]name[/red]"]})

    def headline(self) -> str:
        return f"{STRANGE} [bold]x[/bold]\nsecond line"


def test_what_a_terminal_would_obey_is_its_escape() -> None:
    assert printable(STRANGE) == r"a\x1b[2J\x1b]0;t\x07b\rc\u202e\u2028\x85d"
    assert printable(os.fsdecode(b"x\xff")) == r"x\udcff"  # a name of no encoding, which print would refuse
    assert printable("ρ “x” 模型 -, é") == "ρ “x” 模型 -, é"
    assert printable(printable(STRANGE)) == printable(STRANGE)


@pytest.mark.parametrize("kind", [LyapunovPruneError, CheckFailed])
def test_an_error_is_one_printable_line(kind: type[LyapunovPruneError]) -> None:
    message = str(kind(f"no tensor {STRANGE}\n\n  of x; y"))
    assert message == r"no tensor a\x1b[2J\x1b]0;t\x07b c\u202e d of x; y"


def test_what_is_said_keeps_its_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show(Shown(), Path(STRANGE))
    out = capsys.readouterr().out
    assert all(c.isprintable() for c in out.replace("\n", ""))
    assert out.count("\n") == 6  # two of the headline, three of the table, the path


def test_a_table_on_a_terminal_is_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stream: Any = io.StringIO()
    console = Console(file=stream, force_terminal=True, no_color=True, width=200, legacy_windows=False)
    monkeypatch.setattr(terminal, "Console", lambda: console)
    terminal.show(Shown(), None)
    out = capsys.readouterr().out + stream.getvalue()
    assert "[red]name[/red]" in out
    assert "[bold]x[/bold]\nsecond line" in out
    assert "\x1b[2J" not in out
    assert not {"\x07", "\r", "\u202e", "\u2028"} & set(out)


class Long(Result):
    """More rows than a screen shows, an answer, and a headline beside it."""

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"layer": range(ROWS + 3)})

    def headline(self) -> str:
        return "measured on tokens"

    def answer(self) -> list[str]:
        return ["remove layer 3"]


@pytest.mark.parametrize("full", [False, True])
def test_the_answer_comes_first_and_full_shows_every_row(full: bool, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show(Long(), None, kept=Path("run/x.json"), full=full)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "remove layer 3"
    assert ("measured on tokens" in lines) == full
    assert sum(line.strip().isdigit() for line in lines) == (ROWS + 3 if full else ROWS)
    assert (lines[-1] == f"{ROWS} of {ROWS + 3} rows; lyapunov-prune report run/x.json shows all") != full


def test_a_result_that_no_file_holds_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show(Long(), None)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.strip().isdigit() for line in lines) == ROWS + 3
    assert "measured on tokens" not in lines


class Wide(Result):
    """More columns than a terminal has room for, two of which tell the rows apart together, and a text."""

    def to_frame(self) -> pd.DataFrame:
        rows = 4
        columns: dict[str, Any] = {"layer": [0, 0, 1, 1], "what": ["attention", "mlp"] * 2}
        for c in range(12):
            columns[f"probability_estimate_{c}"] = [(c + 1) * 3.397e-06 / 7**row for row in range(rows)]
        columns["layers"] = [", ".join(map(str, range(10 + row, 50))) for row in range(rows)]
        return pd.DataFrame(columns)

    def headline(self) -> str:
        return ""


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_and_no_header_of_a_wide_table_is_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = io.StringIO()
    console = Console(file=stream, force_terminal=True, no_color=True, width=width, legacy_windows=False)
    monkeypatch.setattr(terminal, "Console", lambda: console)
    terminal.show(Wide(), None)
    lines = re.sub("\x1b\\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    shown = [line.split() for line in lines]
    headers = [words for words in shown if "layer" in words]
    assert len(headers) > 1
    assert all(words[:2] == ["layer", "what"] for words in headers)  # of every block
    frame = Wide().to_frame()
    assert [name for words in headers for name in words[2:]] == [*frame.columns[2:]]
    for row in frame.itertuples(index=False):
        mine = [word for words in shown if words[:2] == [str(row[0]), row[1]] for word in words[2:]]
        assert [word for word in mine if "e-" in word] == [f"{v:.4g}" for v in row if isinstance(v, float)]
    folded = [word.strip(",") for words in shown for word in words if re.fullmatch(r"\d\d,?", word)]
    assert sorted(folded) == sorted(str(n) for row in range(4) for n in range(10 + row, 50))


def test_the_name_of_a_model_adds_no_line() -> None:
    identity = ModelIdentity("m\nRemoval check: passed", "llama", 6, 1, "", (0.0,))
    assert identity.name == r"m\nRemoval check: passed"
    plan = PruningPlan(LayersGone((1,)), "bi\nx", None, np.empty(0), identity, ())
    assert "\n" not in plan.sentence()
