"""tools/attacks.py: it counts what is drawn, and says when an input was not handled."""

from __future__ import annotations

import json
from pathlib import Path

import attacks
import pytest
import typer

TESTS = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=7, database=None)
@given(st.integers())
def test_direct(x):
    pass

def test_inside():
    @settings(max_examples=5, database=None)
    @given(st.integers())
    def check(x):
        pass
    check()
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(attacks, "FOUND", tmp_path / "attacks.json")
    monkeypatch.setattr(attacks, "TESTS", ())
    monkeypatch.setenv("LYAPUNOV_PRUNE_EXAMPLES", "1")  # is put back afterwards
    return tmp_path


def run(test: Path, minutes: float = 0.0001) -> int:
    attacks.TESTS = (str(test),)
    with pytest.raises(typer.Exit) as end:
        attacks.main(minutes=minutes, examples=3)
    return end.value.exit_code


def test_inputs_are_counted_by_test(found: Path) -> None:
    (found / "test_counted.py").write_text(TESTS)
    assert run(found / "test_counted.py") == 0
    content = json.loads(attacks.FOUND.read_text())
    assert (content["rounds"], content["failed"]) == (1, [])
    assert {name.split("::")[1]: n for name, n in content["inputs"].items()} == {"test_direct": 7, "test_inside": 5}
    told = attacks.written()
    assert "all handled as promised" in told["setting"]
    assert told["inputs"].splitlines()[-1] == "| all | 12 |"


def test_an_input_that_is_not_handled_ends_it(found: Path) -> None:
    (found / "test_failing.py").write_text(TESTS + "\n    raise ValueError\n")
    assert run(found / "test_failing.py", minutes=1) == 1
    assert "not handled as promised: " in attacks.written()["setting"]
    assert json.loads(attacks.FOUND.read_text())["rounds"] == 1


def test_the_committed_hour_ended_without_a_finding() -> None:
    content = json.loads(attacks.FOUND.read_text())
    assert content["failed"] == []
    assert content["minutes"] >= 60
