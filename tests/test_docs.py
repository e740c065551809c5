"""README and docs: links and files that are there, commands and names that exist, walks that are the way things go."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import typer
from helpers import TEXT, VOCABULARY, Done, make_tiny, time_briefly, write_gguf
from transformers import PreTrainedModel

import lyapunov_prune
from lyapunov_prune.cli.app import app
from lyapunov_prune.forward import own_text
from lyapunov_prune.models import gguf, loading

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "lyapunov_prune"
DOCS = REPOSITORY / "docs"
NOTEBOOKS = {path: json.loads(path.read_text(encoding="utf-8")) for path in DOCS.rglob("*.ipynb")}


def as_markdown(notebook: dict[str, Any]) -> str:
    parts = (("".join(cell["source"]), cell["cell_type"]) for cell in notebook["cells"])
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in parts)


PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for path in (REPOSITORY / "README.md", *DOCS.rglob("*.md"))
    if DOCS / "api" not in path.parents  # written by `make docs`
}
PAGES |= {path.relative_to(REPOSITORY).as_posix(): as_markdown(notebook) for path, notebook in NOTEBOOKS.items()}
ROOMS = {path.stem for path in PACKAGE.iterdir() if path.stem != "py" and not path.stem.startswith("__")}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return request.param


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def options_of(command: Any) -> set[str]:
    return {"--help", *(name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))}


def typed(text: str) -> Iterator[list[str]]:
    """The command lines that a page shows, in blocks and in the text."""
    blocks = "\n".join(block for block in FENCE.findall(text) if not block.startswith("```python"))
    spans = "\n".join(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))
    for line in re.findall(
        r"^\$? ?(?:lyapunov-prune|accelerate .* -m lyapunov_prune\.cli) (.+)", f"{blocks}\n{spans}", re.MULTILINE
    ):
        yield line.partition("#")[0].split()


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) < 150


def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", PAGES[page])):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        place = Path(os.path.normpath(REPOSITORY / Path(page).parent / path)) if path else REPOSITORY / page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place.read_text(encoding="utf-8")), target


def test_every_page_is_in_the_table_of_contents() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)\)", FENCE.sub("", PAGES["docs/index.md"])))
    entries = {
        line
        for block in re.findall(r"^```\{toctree\}(.*?)^```", PAGES["docs/index.md"], re.M | re.S)
        for line in block.split()
    }
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} - {"index.md"}
    assert pages <= linked
    assert {page.rpartition(".")[0] for page in pages} <= entries


def test_notebooks_hold_no_outputs_and_the_build_makes_them() -> None:
    assert NOTEBOOKS
    for notebook in NOTEBOOKS.values():
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
    settings: dict[str, Any] = {}
    exec((DOCS / "conf.py").read_text(encoding="utf-8"), settings | {"__file__": str(DOCS / "conf.py")}, settings)
    assert settings["nb_execution_mode"] == "force"
    assert settings["nb_execution_raise_on_error"]


def test_files_that_are_named_exist(page: str) -> None:
    inside = r"`((?:lyapunov_prune|docs|tests|experiments|lean|benchmarks)/[^`\s]*)`"
    for path in re.findall(inside, PAGES[page]):
        assert (REPOSITORY / path).exists(), path


def test_commands_and_options_exist(page: str) -> None:
    for name, *arguments in typed(PAGES[page]):
        if name.isupper() or name.startswith("-"):  # `lyapunov-prune COMMAND --help`
            continue
        assert name in COMMANDS, name
        known = options_of(COMMANDS[name])
        for argument in arguments:
            if re.match(r"--?[a-z]", argument):
                assert argument in known, f"{name} {argument}"


def test_options_that_are_named_exist(page: str) -> None:
    if page == "docs/changelog.md":  # names those that went
        return
    known = set().union(*map(options_of, COMMANDS.values())) | {"--model", "--summary"}
    for path in (REPOSITORY / "experiments").rglob("*.py"):  # parameters of a run, which typer makes options of
        known |= {f"--{name.replace('_', '-')}" for name in re.findall(r"(?m)^    (\w+): ", path.read_text())}
    for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGES[page])):
        if not span.startswith("pip "):
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)) <= known, span


def commands_in(section: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"^\| `([a-z]+)", section, re.MULTILINE)))


def test_the_readme_has_the_ten_commands_that_matter_and_their_page_has_all() -> None:
    assert set(commands_in(PAGES["docs/commands.md"].partition("\n## ")[0])) == set(COMMANDS)
    found = commands_in(PAGES["README.md"])
    assert set(found) <= set(COMMANDS)
    assert len(found) <= 10


def test_public_names_in_examples_exist(page: str) -> None:
    for name in re.findall(r"\blp\.(\w+)", PAGES[page]):
        assert hasattr(lyapunov_prune, name), name


def named(text: str) -> list[str]:
    """`room.file.Name` in backticks, in order."""
    names = re.findall(r"`([a-z_]+(?:\.\w+)+)`", text)
    return [name for name in names if name.split(".")[0] in ROOMS and not name.endswith((".html", ".json"))]


def resolved(name: str) -> Any:
    """What a dotted name below the package stands for; a field that instances alone have is None."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        file = PACKAGE.joinpath(*parts[:end])
        if file.with_suffix(".py").is_file() or (file / "__init__.py").is_file():
            break
    value: Any = importlib.import_module(".".join(["lyapunov_prune", *parts[:end]]))
    for part in parts[end:]:
        if inspect.isclass(value) and not hasattr(value, part):
            own = part in getattr(value, "__annotations__", {}) or f"self.{part}" in inspect.getsource(value)
            assert own, name
            return None
        value = getattr(value, part)
    return value


def test_names_of_the_code_exist(page: str) -> None:
    for name in named(PAGES[page]):
        resolved(name)


# Architecture: the order of rooms, and three walks.


def walk(command: str) -> str:
    _, start, rest = PAGES["docs/architecture.md"].partition(f"`lyapunov-prune {command}`")
    assert start, command
    return rest.partition("\n### ")[0]


def test_the_rooms_stand_in_their_order() -> None:
    pyproject = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r'^    "(.*)",', pyproject.partition("\nlayers = [")[2].partition("\n]")[0], re.MULTILINE)
    rooms = PAGES["docs/architecture.md"].partition("## Rooms")[2]
    assert FENCE.findall(rooms)[0].splitlines()[1:-1] == layers
    table = re.findall(r"^\| (`.*?) \|", rooms, re.MULTILINE)
    assert {room for cell in table for room in re.findall(r"`(\w+)`", cell)} == ROOMS


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (
            "prune MODEL --plan plan.json -o smaller",
            ["prune", "tiny", "--plan", "run/plan.json", "-o", "smaller", *TEXT],
        ),
        ("explain DENSE COMPRESSED", ["explain", "tiny", "made", "-o", "run", *TEXT]),
    ],
    ids=["prune", "explain"],
)
def test_a_walk_is_the_way_that_its_command_takes(command: str, arguments: list[str], run: Callable[..., Done]) -> None:
    stops = re.findall(r"^\d+\. `(\w+)`:(.*?)(?=^\d+\. |\Z)", walk(command), re.MULTILINE | re.DOTALL)
    assert len(stops) > 5
    assert all(room in ROOMS for room, _ in stops)
    names = [name for _, stop in stops for name in named(stop)]
    wanted = [code_of(resolved(name)) for name in names]
    if "--plan" in arguments:
        run("rank", "tiny", "--remove", "2", "-o", "run", *TEXT)
    if "made" in arguments:
        run("prune", "tiny", "--layers", "1", "-o", "made", *TEXT)

    called: list[CodeType] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in known:
            called.append(frame.f_code)

    known = set(wanted)
    sys.setprofile(note)
    try:
        done = run(*arguments)
    finally:
        sys.setprofile(None)
    assert done.code == 0, done.err
    calls = iter(called)
    for name, code in zip(names, wanted, strict=True):
        assert code in calls, f"{name} is not called, or not after the stops before it"


def code_of(thing: Any) -> CodeType:
    function = inspect.unwrap(thing.__init__ if inspect.isclass(thing) else thing)
    return getattr(function, "__func__", function).__code__


# The API reference.


def test_a_class_is_linked_to_its_own_module_where_two_have_one_name(tmp_path: Path) -> None:
    """`make docs` takes a name that stands for two classes for a fault."""
    function = "from package.{room} import Recipe\n\n\ndef cook(by: Recipe | None) -> list[Recipe]:\n    pass\n"
    for room in ("a", "b"):
        (tmp_path / "package" / room).mkdir(parents=True)
        (tmp_path / "package" / room / "__init__.py").write_text("class Recipe:\n    pass\n")
        (tmp_path / "package" / room / "use.py").write_text(function.format(room=room))
    spec = importlib.util.spec_from_file_location("api_pages", DOCS / "api_pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    pages.write_pages(tmp_path / "package", tmp_path / "api")
    for room in ("a", "b"):
        recipe = f"~package.{room}.Recipe"
        assert f"cook(by: {recipe} | None) -> list[{recipe}]" in (tmp_path / "api" / f"{room}.md").read_text()


# Examples run as they are written, on a tiny model in place of the built-in one.


def tiny_built_in(vocabulary: int, **changes: Any) -> PreTrainedModel:
    model = make_tiny("llama", vocab_size=vocabulary, max_position_embeddings=1024, **changes)
    for layer in model.model.layers:  # no layer alone is worth a whole budget
        layer.self_attn.o_proj.weight.data *= 0.1
        layer.mlp.down_proj.weight.data *= 0.1
    return model


@pytest.fixture
def built_in(run: Callable[..., Done], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_built_in(len(tokenizer)).save_pretrained(tmp_path / "built-in")
    tokenizer.save_pretrained(tmp_path / "built-in")
    monkeypatch.setattr(loading, "builtin_folder", lambda: tmp_path / "built-in")


@pytest.fixture
def built_in_file(
    run: Callable[..., Done],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write_gguf(tiny_built_in(len(VOCABULARY), num_hidden_layers=4), tmp_path / "built-in.gguf", packed=True)
    monkeypatch.setattr(gguf, "_builtin_file", lambda: file)
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize(
    ("page", "section", "model"),
    [
        ("docs/commands.md", "### A smaller `.gguf` file", "built_in_file"),
        ("docs/guide.md", "# Prune my model", "built_in"),
    ],
    ids=["file", "guide"],
)
def test_the_examples_run_as_written(
    page: str,
    section: str,
    model: str,
    run: Callable[..., Done],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request.getfixturevalue(model)
    # The tiny model writes all windows at once: how many go together changes rounding alone.
    monkeypatch.setattr(own_text, "self_generated", functools.partial(own_text.self_generated, batch_size=100))
    monkeypatch.setattr("lyapunov_prune.shrinking.healing.STEPS", 2)
    time_briefly(monkeypatch)
    text = PAGES[page].partition(f"{section}\n")[2].partition(f"\n{section.split()[0]} ")[0]
    blocks = [block for block in FENCE.findall(text) if block.startswith("```\n")]
    commands = re.findall(r"^lyapunov-prune (.+)", "\n".join(blocks), re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        done = run(*command.split())
        assert done.code == 0, f"{command}: {done.err}"


@pytest.mark.usefixtures("built_in")
def test_the_python_of_the_readme_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    exec(block, {})
    assert "Removal check: passed" in capsys.readouterr().out
