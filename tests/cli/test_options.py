"""Options are declared once, mean one thing, and every command line that is documented is understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import typer
from helpers import Done

from lyapunov_prune.cli import choices
from lyapunov_prune.cli.app import COMMANDS, app
from lyapunov_prune.cli.options import ModelOptions, RunOptions, layer_indices
from lyapunov_prune.cli.records import flattened
from lyapunov_prune.errors import LyapunovPruneError

GROUP: Any = typer.main.get_command(app)
PANELS = {"What", "Model", "Text", "Output"}
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
DOCUMENTED = [
    *re.findall(r"^lyapunov-prune (\S.*)$", README, re.M),
    # In prose and tables.
    "heal PRUNED -o OUT --update-rank 8",
    "hierarchy DENSE --new-tokens 4",
    *(f"{name} {arguments}" for name, (_, arguments) in COMMANDS.items()),
]


def options(name: str) -> dict[str, Any]:
    return {word: p for p in GROUP.commands[name].params for word in p.opts if word.startswith("--")}


@pytest.mark.parametrize("line", DOCUMENTED)
def test_a_documented_command_line_is_understood(line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)
    GROUP.commands[name].make_context(name, arguments)  # parses all, and runs nothing


def test_every_command_has_an_example() -> None:
    assert COMMANDS.keys() == GROUP.commands.keys()
    assert all(f"Example: lyapunov-prune {name}" in GROUP.commands[name].epilog for name in COMMANDS)


@pytest.mark.parametrize(
    ("written", "layers"), [("3", [3]), ("3,7", [3, 7]), ("3-7", [3, 4, 5, 6, 7]), ("0-1, 5,-1", [0, 1, 5, -1])]
)
def test_layers_are_numbers_and_ranges(written: str, layers: list[int]) -> None:
    assert layer_indices("--layers", written) == layers


@pytest.mark.parametrize("written", ["", "3,", "a", "3--7", "3-", "-3-7", "1.5", "7-3", "0-99999999999"])
def test_layers_that_are_none_are_refused(written: str) -> None:
    with pytest.raises(LyapunovPruneError, match="layers"):
        layer_indices("--layers", written)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rank m --criterion ", set(get_args(choices.Criterion))),
        ("compress m --method s", {"sparsegpt", "svd"}),
        ("compress m --allocation a", {"atp"}),
        ("sensitivity m --study a", {"all"}),
    ],
)
def test_a_shell_completes_names(line: str, offered: set[str]) -> None:
    name, *arguments = line.split(" ")
    command = GROUP.commands[name]
    context = command.make_context(name, arguments[:1], resilient_parsing=True)
    option = next(p for p in command.params if arguments[1] in p.opts)
    assert offered <= {item.value for item in option.shell_complete(context, arguments[2])}


@pytest.mark.parametrize("name", GROUP.commands)
def test_every_option_has_its_panel(name: str) -> None:
    for word, option in options(name).items():
        assert option.rich_help_panel in PANELS, word
        for other in GROUP.commands:
            twin = options(other).get(word, option)
            assert twin.rich_help_panel == option.rich_help_panel, (word, other)


@pytest.mark.parametrize("name", GROUP.commands)
def test_a_command_has_at_most_ten_options_of_its_own(name: str) -> None:
    shared = {f"--{field.name}" for field in fields(RunOptions)} | {"--json", "--quiet", "--fail-above"}
    assert len(options(name).keys() - shared) <= 10


def test_the_gpu_is_taken_unless_a_device_is_given(run: Callable[..., Done]) -> None:
    assert ModelOptions().device == "auto"
    taken = [options(name)["--device"].default for name in GROUP.commands if "--device" in options(name)]
    assert taken == ["auto"] * 12


def test_help_shows_the_defaults_of_the_command_and_the_names_of_the_table(run: Callable[..., Done]) -> None:
    for name, tokens in (("profile", 4096), ("check", 512), ("hierarchy", 128), ("heal", 25600)):
        assert f"[default: {tokens}]" in run(name, "--help").out, name
    assert all(f"{name}: " in run("rank", "--help").out for name in ("rho", "bi", "blend"))
    for panel in PANELS:
        assert f"─ {panel} ─" in run("prune", "--help").out


def has_no_effect(line: str, option: str, tail: str = "") -> Any:
    return pytest.param(line, option, tail, id=f"{line} {option}")


OF_A_CRITERION = "applies to layers that a criterion chooses"
MEASURED = "p.json was measured already"


@pytest.mark.parametrize(
    ("line", "option", "tail"),
    [
        *(
            has_no_effect(f"prune tiny -o out {chosen}", option, OF_A_CRITERION)
            for chosen in ("--plan p.json", "--layers 3")
            for option in ("--criterion bi", "--search 9", "--protect 0")
        ),
        *(
            has_no_effect("prune tiny -o out --layers 3 --device disk", option, "no text is read")
            for option in ("--text x", "--tokens 99")
        ),
        has_no_effect("prune tiny -o out --remove 1 --criterion kl", "--search 9", "has no effect on --criterion kl"),
        *(
            has_no_effect("rank p.json", option, MEASURED)
            for option in (*("--text x", "--device cpu", "--tokens 999", "--dtype bfloat16"),)
        ),
        has_no_effect("sensitivity tiny --study removal", "--sparsity 0.9", "has no effect on removal"),
    ],
)
def test_an_option_without_effect_is_refused(line: str, option: str, tail: str, run_bad: Callable[..., str]) -> None:
    word = next(each for each in reversed(option.split()) if each.startswith("--"))
    Path("p.json").touch()
    told = run_bad(*line.split(), *option.split())
    assert told.startswith(f"error: {word} ")
    assert tail in told


def test_options_that_have_an_effect_are_taken(run: Callable[..., Done]) -> None:
    text = ("--tokens", "128", "--context", "64")
    done = run("rank", "tiny", *text, "-o", "run", "--criterion", "blend")
    assert done.code == 0
    own = ("run/profile.json", "--remove", "2")
    assert run("rank", *own, "--criterion", "blend").code == 0
    assert run("rank", *own, "--criterion", "random").code == 0
    assert run("prune", "tiny", *text, "--plan", "run/plan.json", "-o", "out").code == 0


@pytest.mark.parametrize("name", GROUP.commands)
def test_a_paragraph_of_help_has_no_line_breaks_of_its_own(name: str) -> None:
    assert not re.search(r"[^\n]\n(?!\n|- )", GROUP.commands[name].help)


def test_a_list_in_a_docstring_keeps_its_lines() -> None:
    def measure() -> None:
        """One.

        Two goes
        on:
        - a, which
          goes on;
        - b.

        Three.
        """

    assert flattened(measure).__doc__ == "One.\n\nTwo goes on:\n- a, which goes on;\n- b.\n\nThree."


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


# Numbers that no option can mean, by the type of the option.
NEVER = {
    float: ("nan", "inf", "-inf", "1e999", "x"),
    int: ("nan", "inf", "1.5", "1e3", str(2**53 + 1), str(10**30), str(-(10**30))),
}
ARGUMENTS = {
    "profile": ["tiny"],
    "rank": ["tiny"],
    "eval": ["tiny"],
    "check": ["tiny", "--bounds"],
    "sensitivity": ["tiny"],
}
ARGUMENTS |= {name: ["tiny", "-o", "out"] for name in ("prune", "compress", "heal", "shrink")} | {
    "joint": ["tiny", "--remove", "2", "-o", "out"],
    "hierarchy": ["tiny"],
    "explain": ["tiny", "tiny"],
}


def numeric_options(name: str) -> list[tuple[str, type]]:
    kinds = {word: getattr(option, "type_descriptor", None) for word, option in options(name).items()}
    return [
        (word, kind)
        for word, told in kinds.items()
        for kind in NEVER
        if told is not None and kind in (told.annotation, *get_args(told.annotation))
    ]


def test_every_command_that_takes_a_number_is_tried() -> None:
    assert {name for name in GROUP.commands if numeric_options(name)} == ARGUMENTS.keys()
    assert ("--search", float) in set(numeric_options("prune"))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_number_that_is_none_is_refused_at_the_door(
    name: str, run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every option of every command, before anything is loaded; the line names the option."""

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lyapunov_prune.models.loading.load", load)
    for word, kind in numeric_options(name):
        for value in NEVER[kind]:
            assert word in run_bad(name, *ARGUMENTS[name], f"{word}={value}"), (word, value)
