"""No command scores a model on the text that it was made with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import COMMANDS, TEXT, Done

from lyapunov_prune.results.history import History

LONGER = ["--tokens", "512", "--context", "64"]
COMPRESS = ["compress", "--method", "magnitude", "--sparsity", "0.3"]
PRUNE = ["prune", "--remove", "1", "--criterion", "bi"]

# The text that a model was chosen on.


@pytest.fixture
def text(checkpoint: Path) -> str:
    lines = (f"Line {n} of a text, and its number squared is {n * n}.\n\n" for n in range(200))
    (checkpoint.parent / "own.txt").write_text("".join(lines))
    return "own.txt"


def turned(text: str) -> str:
    """A file of `text` with the other half first, so that what is scored is what others calibrate on."""
    path = Path(text).with_name("turned.txt")
    path.write_text("".join(Path(text).read_text().partition("Line 100 ")[::2][::-1]))
    return str(path)


def test_a_pruned_model_is_not_scored_on_its_calibration_text(
    text: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    turned(text)
    run("prune", "--remove", "1", "tiny", "-o", "out", *LONGER, "--text", text)
    for spelling in ("turned.txt", "./turned.txt", "tiny/../turned.txt"):
        line = run_bad("eval", "out", *LONGER, "--text", spelling)
        assert f"out was made with {text} (calibration; step 1 of its history, prune), which holds about" in line
        assert f"tokens of {spelling} (evaluation) to score; give another text" in line


def test_the_evaluation_half_is_not_offered_where_it_is_what_was_seen(
    text: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    whole = Path(text).read_text()
    Path("second.txt").write_text(whole[whole.index("\n\n", len(whole) // 2) + 2 :])
    wide = ("--context", "64")  # a passage that is seen again is longer than a window of sixteen tokens
    run(*COMMANDS["prune"], "--criterion", "bi", "--text", "second.txt", *wide)
    line = run_bad("eval", "out", *TEXT, "--text", text, *wide)
    assert line.rstrip().endswith("(evaluation) to score; give another text")


def test_a_pruned_model_is_scored_on_other_text(text: str, run: Callable[..., Done]) -> None:
    run(*COMMANDS["prune"], "--text", text)
    for other in ("own.txt", "builtin"):  # its other half, and another
        assert run("eval", "out", *TEXT, "--text", other).code == 0


def test_the_calibration_text_is_known_by_its_content(
    text: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    """In a copy, with a paragraph more, and from another folder."""
    assert run(*PRUNE, "tiny", "-o", "out", *LONGER, "--text", text).code == 0
    own = Path(text).read_text()
    Path("copy.txt").write_text(own)
    Path("more.txt").write_text("A paragraph that was added.\n\n" + own)
    Path("deep/er").mkdir(parents=True)
    for folder, above, where in ((".", "", "copy.txt"), (".", "", "more.txt"), ("deep/er", "../../", text)):
        os.chdir(folder)
        line = run_bad("eval", f"{above}out", *LONGER, "--text", turned(f"{above}{where}"))
        assert f"{above}out was made with {text} (calibration; step 1" in line
        assert "turned.txt (evaluation)" in line
        assert run("eval", f"{above}out", *LONGER, "--text", f"{above}{where}").code == 0


def test_weights_alone_see_no_text(text: str, run: Callable[..., Done]) -> None:
    run(*COMPRESS, "tiny", "-o", "out")
    assert run("eval", "out", *LONGER, "--text", turned(text)).code == 0


@pytest.mark.usefixtures("healing_kept")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PRUNE, COMPRESS),
        (["compress", "--method", "wanda", "--sparsity", "0.3"], ["prune", "--layers", "0"]),
        (PRUNE, ["prune", "--layers", "0"]),
        (PRUNE, ["prune", "--layers", "0", "--device", "disk"]),
        (PRUNE, ["heal", "--steps", "1", "--teacher", "tiny"]),
    ],
    ids=lambda options: " ".join(options[::2]),
)
def test_a_second_step_keeps_what_the_first_saw(
    first: list[str], second: list[str], text: str, run: Callable[..., Done], run_bad: Callable[..., str]
) -> None:
    assert run(*first, "tiny", "-o", "out", *LONGER, "--text", text).code == 0
    reads = [] if "disk" in second or second == COMPRESS else LONGER
    assert run(*second, "out", "-o", "again", *reads).code == 0
    assert [step.kind for step in History.load("again/history.json").steps] == [first[0], second[0]]
    line = run_bad("eval", "again", *LONGER, "--text", turned(text))
    assert f"made with own.txt (calibration; step 1 of its history, {first[0]})" in line
    assert run("eval", "again", *LONGER, "--text", text).code == 0


def test_what_measures_on_held_out_text_asks_the_history_too(text: str, run: Callable[..., Done]) -> None:
    turned(text)
    run(*PRUNE, "tiny", "-o", "out", *LONGER, "--text", text)
    for command in (
        ["hierarchy", "tiny", "out", "--new-tokens", "1"],
        ["sensitivity", "out", "--study", "removal"],
        ["explain", "tiny", "out"],
    ):
        done = run(*command, *LONGER, "--text", "turned.txt")
        assert done.code == 2, command
        assert "made with own.txt (calibration" in done.err
        assert "turned.txt (evaluation)" in done.err
