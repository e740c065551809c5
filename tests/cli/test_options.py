"""Options are declared once, mean one thing, and every command line that is documented is understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from helpers import Done

from lyapunov_prune.cli.app import app
from lyapunov_prune.cli.options import FORMER, ModelOptions, with_todays_words
from lyapunov_prune.cli.records import flattened

GROUP: Any = typer.main.get_command(app)
PANELS = {"What", "Model", "Text", "Output"}
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
DOCUMENTED = [
    *re.findall(r"^lyapunov-prune (\S.*)$", README, re.M),
    # In prose and tables.
    "profile MODEL --method jvp",
    "sensitivity MODEL --study threshold --limit 3",
    "heal PRUNED -o OUT --rank 8",
    "heal PRUNED -o OUT --rank=8",
    "hierarchy DENSE --steps 4",
]


def options(name: str) -> dict[str, Any]:
    return {word: p for p in GROUP.commands[name].params for word in p.opts if word.startswith("--")}


@pytest.mark.parametrize("line", DOCUMENTED)
def test_a_documented_command_line_is_understood(line: str) -> None:
    name, *arguments = with_todays_words(shlex.split(line, comments=True))
    GROUP.commands[name].make_context(name, arguments)  # parses all, and runs nothing


@pytest.mark.parametrize("name", FORMER)
def test_a_former_word_is_another_s_today(name: str) -> None:
    for former, word in FORMER[name].items():
        assert word in options(name)
        assert former not in options(name)
        assert any(former in options(other) for other in GROUP.commands)


@pytest.mark.parametrize("name", GROUP.commands)
def test_every_option_has_its_panel(name: str) -> None:
    for word, option in options(name).items():
        assert option.rich_help_panel in PANELS, word
        for other in GROUP.commands:
            twin = options(other).get(word, option)
            assert twin.rich_help_panel == option.rich_help_panel, (word, other)


@pytest.mark.parametrize("name", GROUP.commands)
def test_every_command_prints_json(name: str) -> None:
    assert "--json" in options(name)


def test_the_gpu_is_taken_unless_a_device_is_given(run: Callable[..., Done]) -> None:
    assert ModelOptions().device == "auto"
    taken = [options(name)["--device"].default for name in GROUP.commands if "--device" in options(name)]
    assert taken == ["auto"] * 10


def test_help_shows_the_defaults_of_the_command_and_the_names_of_the_table(run: Callable[..., Done]) -> None:
    for name, tokens in (("profile", 4096), ("check", 512), ("hierarchy", 128), ("heal", 25600)):
        assert f"[default: {tokens}]" in run(name, "--help").out, name
    assert "<rho|bi|blend|" in run("rank", "--help").out
    for panel in PANELS:
        assert f"─ {panel} ─" in run("prune", "--help").out


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(help="In tokens.")] = 1
    deep: Annotated[bool, typer.Option("--deep")] = False


def test_a_record_is_an_option_a_field() -> None:
    given: list[tuple[str, Size, bool]] = []

    def measure(name: str, *, size: Size = Size(width=7), twice: bool = False) -> None:
        given.append((name, size, twice))

    own = typer.Typer()
    own.command()(flattened(measure))
    own(["x"], standalone_mode=False)
    own(["y", "--width", "3", "--deep", "--twice"], standalone_mode=False)
    assert given == [("x", Size(7), False), ("y", Size(3, True), True)]
