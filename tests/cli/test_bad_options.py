"""A bad text, option or choice of layers is one line and exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import COMMANDS, QUICK, TEXT, Done

# Bad text.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"", "x.txt (calibration) holds no text"),
        ("x.txt", b"short", "lower --tokens"),
        ("x.txt", b"caf\xe9 " * 999, "x.txt: byte 3"),
        ("x.jsonl", b'{"text": 1}', "x.jsonl line 1"),
        ("y.txt", b"", "x.txt is no readable file"),
    ],
    ids=["empty", "short", "Latin-1", "JSONL", "missing"],
)
def test_a_bad_text(name: str, content: bytes, message: str, run_bad: Callable[..., str]) -> None:
    Path(name).write_bytes(content)
    assert message in run_bad(*COMMANDS["profile"], "--text", name.replace("y", "x"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "129", "--tokens", "258"], "longer than the model's 128"),
        (["--tokens", "8"], "do not fill one window of 16"),
        (["--dtype", "float99"], "'float99' is not one of"),
        (["--device", "bogus"], "no device bogus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_common_option(options: list[str], message: str, command: list[str], run_bad: Callable[..., str]) -> None:
    assert message in run_bad(*command, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epsilon", "0"], "epsilon is 0"),
        (["--epsilon", "nan"], "epsilon"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_of_profile(options: list[str], message: str, run_bad: Callable[..., str]) -> None:
    assert message in run_bad(*COMMANDS["profile"], *options)


# Bad choices of layers.


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (["--remove", "6"], "remove 6 of 6 layers"),
        (["--remove", "99"], "remove 99 of 6 layers"),
        (["--remove", "0"], "'0' is neither a number above 0"),
        (["--remove", "-1"], "'-1' is neither a number above 0"),
        (["--layers", "3,3"], "layer 3 is named 2 times"),
        (["--layers", "1,99"], "there is no layer 99; the 6 layers are 0 to 5"),
        (["--layers", "-1"], "there is no layer -1"),
        (["--layers", "0,1,2,3,4,5"], "keep at least one"),
        (["--layers", "a,b"], "--layers 'a,b'"),
        (["--layers", ""], "is not a list of layers"),
        ([], "--layers 3,7 or --plan FILE"),
        (["--remove", "1", "--layers", "1"], "one of the three"),
        (["--remove", "1", "--criterion", "good"], "'good' is not one of"),
        (["--remove", "100%"], "a share below 100%"),
        (["--remove", "0%"], "a share below 100%"),
        (["--remove", "some"], "'some' is neither a number"),
        (["--remove", "2.5"], "'2.5' is neither a number"),
        (["--remove", "1", "--criterion", "bi", "--search", "9"], "--search has no effect on --criterion bi"),
        (["--layers", "2", "--judge", "builtin"], "--judge names"),
        (
            ["--remove", "1", "--criterion", "best", "--what", "attention"],
            "best is defined for whole layers",
        ),
        (["--remove", "1", "--protect", "0,x"], "--protect '0,x'"),
        (["--remove", "1", "--protect", "6"], "layer 6 to protect"),
        (["--remove", "2", "--protect", "0,1,2,3,-1"], "the protected, and 2"),
        (["--layers", "1", "--protect", "0"], "--protect applies to layers"),
        (["--plan", "absent.json"], "absent.json is not there"),
        (["--plan", "tiny/config.json"], "it holds no result"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_choice_of_layers(choice: list[str], message: str, run_bad: Callable[..., str]) -> None:
    assert message in run_bad("prune", "tiny", "-o", "out", *choice, *TEXT)


def test_a_bad_choice_when_ranking(run: Callable[..., Done], run_bad: Callable[..., str]) -> None:
    run("profile", "tiny", "-o", "run", *QUICK)
    for source in ("tiny", "run/profile.json"):
        for choice in (["--remove", "6"], ["--remove", "0"], ["--criterion", "good"]):
            run_bad("rank", source, *TEXT, *choice)


def test_empty_names_and_texts_are_named_as_such(run_bad: Callable[..., str], checkpoint: Path) -> None:
    (checkpoint.parent / "blank.txt").write_text("\n\n  \n" * 99)
    assert "an empty name" in run_bad("eval", "tiny", "--text", "")
    assert "blank.txt (evaluation, less what repeats the first half) holds no text" in run_bad(
        "eval", "tiny", "--text", "blank.txt", *TEXT
    )
    assert "no model at ''" in run_bad("eval", "", *TEXT)


def test_what_is_decoded_has_to_fit_the_context_too(run_bad: Callable[..., str]) -> None:
    line = run_bad("hierarchy", "tiny", "--tokens", "128", "--context", "128", "--new-tokens", "2")
    assert "context 128 and 1 more tokens are longer than the model's 128" in line


def test_an_unknown_choice(run_bad: Callable[..., str]) -> None:
    told = run_bad(*COMMANDS["profile"], "--dtype", "int8")
    assert "'int8' is not one of 'float32'" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["unknown"], "'unknown'"),
        (["--unknown"], "--unknown"),
        (["profile"], "Missing argument 'model'"),
        (["prune", "tiny"], "Missing option '--output'"),
        (["prune", "tiny", "-o"], "requires an argument"),
        (["profile", "tiny", "extra"], "extra"),
        (["profile", "tiny", "--tokens", "many"], "'--tokens'"),
        (["profile", "tiny", "--tokens", "1"], "'--tokens'"),
        (["profile", "tiny", "--seeds", "0"], "'--seeds'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_usage_error(arguments: list[str], message: str, run_bad: Callable[..., str]) -> None:
    line = run_bad(*arguments)
    assert message in line
    assert line.endswith(" --help\n")
    assert "COMMAND" not in line


@pytest.mark.parametrize("arguments", [[], ["--help"], ["prune", "--help"]], ids=" ".join)
def test_help_is_no_error(arguments: list[str], run: Callable[..., Done]) -> None:
    done = run(*arguments)
    assert (done.code, done.err, done.changed) == (0, "", set())
    assert "Usage: lyapunov-prune" in done.out
