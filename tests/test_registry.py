"""A registry imports what is asked for, and refuses names and options that it does not have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.registry import Choice, Registry

PLAIN = """
from lyapunov_prune.registry import Choice

class Plain(Choice):
    pass
"""
BETWEEN_TWO = """
from things.plain import Plain

class BetweenTwo(Plain):
    scale: float = 1.0
    steps: int | None = None
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[Choice]:
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "plain.py").write_text(PLAIN)
    (tmp_path / "things" / "between_two.py").write_text(BETWEEN_TWO)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("things", "things.plain", "things.between_two"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return Registry("thing", "things", ("plain", "between-two", "gone"))


def test_a_class_is_imported_when_it_is_asked_for(rows: Registry[Choice]) -> None:
    assert list(rows) == ["plain", "between-two", "gone"]
    assert "gone" in rows
    assert "things.between_two" not in sys.modules
    assert rows["between-two"].__name__ == "BetweenTwo"
    with pytest.raises(ModuleNotFoundError):
        rows["gone"]


@pytest.mark.parametrize(
    ("text", "row", "told"),
    [
        ("x = 1", "new", "'new' stands for one thing, and things.new defines none; define one"),
        (PLAIN + PLAIN.replace("Plain", "Other"), "new", "defines Plain and Other; define one"),
        ("from things.plain import Plain", "new", "defines none"),
        (PLAIN, "new_one", "whose name is 'new-one'$"),
    ],
    ids=["no class", "two", "another's", "underscore"],
)
@pytest.mark.usefixtures("rows")
def test_a_row_whose_file_is_no_choice_says_what_to_do(
    text: str, row: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "things" / f"{row}.py").write_text(text)
    monkeypatch.delitem(sys.modules, f"things.{row}", raising=False)
    with pytest.raises(LyapunovPruneError, match=told):
        Registry[Choice]("thing", "things", (row,))[row]


def test_a_class_has_the_name_of_its_file(rows: Registry[Choice]) -> None:
    assert (rows["plain"].name, rows["between-two"].name) == ("plain", "between-two")


def test_an_unknown_name_is_refused_with_those_that_are_known(rows: Registry[Choice]) -> None:
    with pytest.raises(LyapunovPruneError, match=r"thing 'other'.* plain, between-two, gone$"):
        rows["other"]


@pytest.mark.usefixtures("rows")
def test_options_are_those_of_the_class() -> None:
    rows = Registry[Choice]("thing", "things", ("plain", "between-two"))
    made = rows.make("between-two", scale=2, steps=3)
    assert made == rows["between-two"](2, 3)  # type: ignore[call-arg]
    with pytest.raises(LyapunovPruneError, match=r"plain has no scale; .* one of between-two$"):
        rows.make("plain", scale=2)
    with pytest.raises(LyapunovPruneError, match=r"between-two has no other; it has scale, steps$"):
        rows.make("between-two", other=2)
    with pytest.raises(LyapunovPruneError, match="plain has no other; it has no options"):
        rows.make("plain", other=2)


@pytest.mark.parametrize(("option", "value"), [("scale", "2"), ("scale", float("nan")), ("steps", 1.5)])
def test_an_option_of_another_type_is_refused(rows: Registry[Choice], option: str, value: object) -> None:
    with pytest.raises(LyapunovPruneError, match=f"{option} of between-two is {value!r}; give "):
        rows.make("between-two", **{option: value})
