"""A registry imports what is asked for, and refuses names and options that it does not have."""

from __future__ import annotations

import sys

import pytest

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.registry import Choice, Registry


class Plain(Choice):
    name = "plain"


class BetweenTwo(Choice):
    scale: float = 1.0
    steps: int | None = None

    name = "between-two"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Registry[Choice]:
    for file in ("things", "things.plain", "things.between_two"):
        monkeypatch.setitem(sys.modules, file, sys.modules[__name__])
    return Registry("thing", "things", ("plain", "between-two", "gone"))


def test_a_class_is_imported_when_it_is_asked_for(rows: Registry[Choice]) -> None:
    assert list(rows) == ["plain", "between-two", "gone"]
    assert "gone" in rows
    assert rows["between-two"] is BetweenTwo
    with pytest.raises(ModuleNotFoundError):
        rows["gone"]


def test_an_unknown_name_is_refused_with_those_that_are_known(rows: Registry[Choice]) -> None:
    with pytest.raises(LyapunovPruneError, match=r"thing 'other'.* plain, between-two, gone$"):
        rows["other"]


@pytest.mark.usefixtures("rows")
def test_options_are_those_of_the_class() -> None:
    rows = Registry[Choice]("thing", "things", ("plain", "between-two"))
    assert rows.make("between-two", scale=2, steps=3) == BetweenTwo(2, 3)
    with pytest.raises(LyapunovPruneError, match=r"plain has no scale; .* one of between-two$"):
        rows.make("plain", scale=2)
    with pytest.raises(LyapunovPruneError, match=r"between-two has no other; it has scale, steps$"):
        rows.make("between-two", other=2)
    with pytest.raises(LyapunovPruneError, match="plain has no other; it has no options"):
        rows.make("plain", other=2)


@pytest.mark.parametrize(("option", "value"), [("scale", "2"), ("scale", float("nan")), ("steps", 1.5)])
def test_an_option_of_another_type_is_refused(option: str, value: object) -> None:
    with pytest.raises(LyapunovPruneError, match=f"{option} of between-two is {value!r}; give "):
        BetweenTwo(**{option: value})  # type: ignore[arg-type]
