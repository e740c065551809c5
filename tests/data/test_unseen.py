"""Items, questions and documents that a step saw are known in its text, and others are not."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Done, make_tiny
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.data.text import load_text
from lyapunov_prune.data.unseen import require_unseen_items, strings_of
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.gguf import builtin_folder
from lyapunov_prune.results.history import History, Step, history_of, keep_history

WORDS = """
river engine violin harvest comet glacier theorem lantern orchard furnace crosses powers accompanies follows outshines
carves implies guides feeds warms valley factory village sky mountain lecture harbour town hut slowly never
""".split()  # noqa: SIM905 (a list would fill the page)


def words(seed: int, n: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def question(n: int) -> str:
    return f"Which of the following answers is right if in {1300 + n} the {words(n, 18)} near the {words(-n - 1, 6)}?"


def brief(n: int) -> str:
    """Where a token is a letter or two, and the context 128."""
    return f"Who {words(n, 9)}?"


def items(first: int, last: int, ask: Callable[[int], str] = question) -> list[dict[str, object]]:
    return [
        {"query": ask(n), "choices": [f"The {words(n, 1)} stays.", f"It {words(n + 1, 1)} too."], "gold": 0}
        for n in range(first, last)
    ]


def prose(first: int, last: int, ask: Callable[[int], str] = question) -> str:
    """Every question among other words, with its answer."""
    return "\n\n".join(f"Exercise {n}.\n{ask(n)}\nAnswer: The {words(n, 1)} stays." for n in range(first, last))


@pytest.fixture(scope="module")
def english_tokens() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(builtin_folder())


@pytest.fixture
def made(english_tokens: PreTrainedTokenizerBase, tmp_path: Path) -> PreTrainedModel:
    """A model that was made with questions 0 to 39."""
    (tmp_path / "own.txt").write_text(prose(0, 40))
    model = make_tiny("llama")
    batch = load_text(tmp_path / "own.txt", english_tokens, tokens=2048, context=512, split="all")
    keep_history(model, History((Step("compress", "m", (batch.measured_on(model),)),)))
    return model


def strings(first: int, last: int) -> list[tuple[str, ...]]:
    return [tuple(strings_of(item)) for item in items(first, last)]


def test_every_item_in_the_text_is_known(made: PreTrainedModel, english_tokens: PreTrainedTokenizerBase) -> None:
    for n in range(20):
        with pytest.raises(LyapunovPruneError, match=r"own\.txt .*compress.*1 of the 1 items"):
            require_unseen_items(made, english_tokens, strings(n, n + 1), "x")


def test_the_line_counts_and_names_the_first(made: PreTrainedModel, english_tokens: PreTrainedTokenizerBase) -> None:
    some = [*strings(90, 95), *strings(3, 6)]
    with pytest.raises(
        LyapunovPruneError,
        match="3 of the 8 items of x",
    ):
        require_unseen_items(made, english_tokens, some, "x")


def test_items_of_the_same_form_are_not_taken_for_those(
    made: PreTrainedModel, english_tokens: PreTrainedTokenizerBase
) -> None:
    require_unseen_items(made, english_tokens, strings(100, 400), "x")
    short = [("Two and two?", "four", "five"), ("",), ()]
    require_unseen_items(made, english_tokens, short, "x")


def test_a_document_that_is_mostly_seen_is_known(
    made: PreTrainedModel, english_tokens: PreTrainedTokenizerBase
) -> None:
    seen, new = " ".join(map(question, range(5))), " ".join(map(question, range(200, 209)))
    require_unseen_items(made, english_tokens, [(new,)], "x", "documents")
    require_unseen_items(made, english_tokens, [(f"{seen} {new}",)], "x", "documents")  # a third of it
    with pytest.raises(LyapunovPruneError, match="1 of the 1 documents"):
        require_unseen_items(made, english_tokens, [(f"{new[: len(seen) // 10]} {seen}",)], "x", "documents")


def test_a_history_of_an_older_version_cannot_tell(
    made: PreTrainedModel, english_tokens: PreTrainedTokenizerBase
) -> None:
    (step,) = history_of(made).steps
    old = copy.copy(made)
    keep_history(old, History((replace(step, saw=(replace(step.saw[0], short=None),)),)))
    require_unseen_items(old, english_tokens, strings(0, 5), "x")


def test_strings_of_an_item() -> None:
    item = {"id": 7, "query": "a", "choices": {"text": ["b", "c"], "label": ("A",)}, "none": None}
    assert list(strings_of(item)) == ["a", "b", "c", "A"]


# The commands that score items.

CALIBRATED = ["--text", "own.txt", "--tokens", "2048", "--context", "128"]


@pytest.fixture
def seen_by_out(run: Callable[..., Done]) -> None:
    """`out` is `tiny` without a layer, chosen on the first half of a text that holds questions 0 to 39."""
    Path("own.txt").write_text(prose(0, 80, brief))
    for name, (first, last) in {"seen": (0, 5), "other": (5000, 5003)}.items():
        these = items(first, last, brief)
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in these))
    assert run("prune", "tiny", "--remove", "1", "-o", "out", *CALIBRATED).code == 0


EVAL = ["eval", "out", "--tokens", "64", "--context", "32"]
HIERARCHY = ["hierarchy", "tiny", "out", "--tokens", "64", "--context", "32", "--new-tokens", "1"]


@pytest.mark.usefixtures("seen_by_out")
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (EVAL, lambda name: ["--tasks", f"{name}.jsonl"]),
        (["eval", "tiny", "--against", "out", *EVAL[2:]], lambda name: ["--tasks", f"{name}.jsonl"]),
        (HIERARCHY, lambda name: ["--choices", f"{name}.jsonl"]),
    ],
    ids=["tasks", "against", "choices"],
)
def test_items_that_a_model_was_made_with_are_not_scored(
    command: list[str], options: Callable[[str], list[str]], run: Callable[..., Done]
) -> None:
    done = run(*command, *options("seen"))
    assert done.code == 2
    assert "made with own.txt (calibration" in done.err
    assert not done.changed
    assert run(*command, *options("other")).code == 0
