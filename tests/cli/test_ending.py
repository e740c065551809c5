"""How a command ends: what it means, what to give next, or one JSON document; and an exit code for CI."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import typer
from helpers import TEXT, Done

from lyapunov_prune.cli.app import COMMANDS, app
from lyapunov_prune.cli.following import _COSTLY, _NEXT, following
from lyapunov_prune.results.worth import Ratio

GROUP: Any = typer.main.get_command(app)
LINES = sorted({line for each in (_NEXT, _COSTLY) for lines in each.values() for line in lines})


@pytest.mark.parametrize("line", LINES)
def test_a_command_that_is_named_next_is_understood(line: str) -> None:
    name, *arguments = shlex.split(line.replace("{", "x").replace("}", ""))
    GROUP.commands[name].make_context(name, arguments)


def test_every_template_names_arguments_of_its_command() -> None:
    assert _NEXT.keys() <= COMMANDS.keys()
    for command in _NEXT:
        values = {p.name: "a b" for p in GROUP.commands[command].params}
        assert "{" not in following(command, values, Ratio(2, 2, 2))
    assert following("check", {"model": "m", "compressed": None}, None) == "eval m"
    assert following("compress", {"model": "m", "output": "a b"}, None) == "eval 'a b' --against m"


def test_a_document_is_all_of_stdout_and_what_costs_too_much_is_exit_code_1(run: Callable[..., Done]) -> None:
    line = ("prune", "tiny", "--layers", "1", *TEXT)
    done = run(*line, "-o", "out", "--fail-above", "1e9", "--json")
    pruned = json.loads(done.out)
    assert done.code == 0
    assert [result["kind"] for result in pruned["results"]] == ["Provenance", "Evaluation"]
    assert pruned["written"] == ["out"]
    assert shlex.split(pruned["next"])[:3] == ["lyapunov-prune", "eval", "out"]
    assert pruned["lines"][0] in done.err
    most = f"{max(1.0, pruned['ratio']['high'] - 1e-6):.9g}"
    scored = ("eval", "out", "--against", "tiny", *TEXT, "--json", "--quiet")
    done = run(*scored, "--fail-above", most)
    told = json.loads(done.out)
    assert told["ratio"] == pytest.approx(pruned["ratio"])
    assert done.code == (told["ratio"]["high"] > 1)
    assert (told["failed"] is None) is (done.code == 0)
    assert run(*scored).err == ""
    assert run(*scored[:4], "--tokens", "32", "--context", "16", "--fail-above", "1e9").code == 1  # too few windows
    assert run("eval", "tiny", "--fail-above", "2").code == 2  # no model to compare with
    assert json.loads(run("theorems", "--json").out)["lines"]
