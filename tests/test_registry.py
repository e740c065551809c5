"""A registry imports what is asked for, and refuses names and options that it does not have."""

from __future__ import annotations

import sys

import pytest

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.registry import Choice, Registry


class Plain(Choice):
    name = "plain"


class Scaled(Choice):
    scale: float = 1.0
    steps: int | None = None

    name = "scaled"


def registry() -> Registry[Choice]:
    sys.modules.setdefault("registered", sys.modules[__name__])
    return Registry("thing", {"plain": "registered:Plain", "scaled": "registered:Scaled", "gone": "no.such:Module"})


def test_a_class_is_imported_when_it_is_asked_for() -> None:
    rows = registry()
    assert list(rows) == ["plain", "scaled", "gone"]
    assert "gone" in rows
    assert rows["scaled"] is Scaled
    with pytest.raises(ModuleNotFoundError):
        rows["gone"]


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(LyapunovPruneError, match=r"thing 'other'.* plain, scaled, gone$"):
        registry()["other"]


def test_options_are_those_of_the_class() -> None:
    rows = Registry[Choice]("thing", {name: f"registered:{name.title()}" for name in ("plain", "scaled")})
    registry()
    assert rows.make("scaled", scale=2, steps=3) == Scaled(2, 3)
    with pytest.raises(LyapunovPruneError, match=r"plain has no scale; .* one of scaled$"):
        rows.make("plain", scale=2)
    with pytest.raises(LyapunovPruneError, match=r"scaled has no other; it has scale, steps$"):
        rows.make("scaled", other=2)
    with pytest.raises(LyapunovPruneError, match="plain has no other; it has no options"):
        rows.make("plain", other=2)


@pytest.mark.parametrize(("option", "value"), [("scale", "2"), ("scale", float("nan")), ("steps", 1.5)])
def test_an_option_of_another_type_is_refused(option: str, value: object) -> None:
    with pytest.raises(LyapunovPruneError, match=f"{option} of scaled is {value!r}; give "):
        Scaled(**{option: value})  # type: ignore[arg-type]
