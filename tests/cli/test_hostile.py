"""Input of a stranger on the command line: one line and exit code 2 and nothing written, or the work is done."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers import QUICK, TEXT, Done, edit_json, limit_file_size
from transformers import PreTrainedModel

from lyapunov_prune.cli.app import main
from lyapunov_prune.pruning.plan import PruningPlan

pytestmark = pytest.mark.usefixtures("drawn")
PRUNE = ["prune", "tiny", "--layers", "1", "-o", "out", *TEXT]
DEEP = "[" * 100_000 + "]" * 100_000


# config.json


@pytest.mark.parametrize(
    "setting", [{"output_attentions": True}, {"output_hidden_states": True}, {"return_dict": False}]
)
@pytest.mark.parametrize("more", [TEXT, ["--device", "disk"]], ids=" ".join)
def test_what_a_config_asks_to_be_handed_out_changes_nothing(
    setting: dict[str, bool], more: list[str], checkpoint: Path, run: Callable[..., Done]
) -> None:
    assert run(*PRUNE[:6], *more).code == 0
    edit_json(checkpoint / "config.json", **setting)
    done = run(*PRUNE[:4], "-o", "again", *more)
    assert (done.code, done.err) == (0, "")
    checks = [json.loads(Path(f, "provenance.json").read_text())["gate"]["checks"] for f in (PRUNE[5], "again")]
    assert checks[0] == checks[1]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"architectures": 3}, "architectures"),
        ({"architectures": [3]}, "architectures"),
        ({"sliding_window": "8"}, "sliding_window"),
        ({"sliding_window": 2.5}, "sliding_window"),
        ({"sliding_window": -3}, "sliding_window"),
        ({"sliding_window": 10**30}, "sliding_window"),
        ({"vocab_size": "260"}, "'vocab_size'"),
    ],
    ids=str,
)
def test_a_setting_of_a_wrong_type_is_refused(
    setting: dict[str, Any], told: str, checkpoint: Path, run_bad: Callable[..., str]
) -> None:
    edit_json(checkpoint / "config.json", **setting)
    assert told in run_bad(*PRUNE)


@pytest.mark.parametrize("context", ["2", "8", "9"])
def test_a_gate_takes_windows_that_are_shorter_than_its_steps(
    context: str, checkpoint: Path, run: Callable[..., Done]
) -> None:
    edit_json(checkpoint / "config.json", max_position_embeddings=int(context))
    done = run(*PRUNE[:6], "--tokens", "64", "--context", context)
    assert (done.code, done.err) == (0, "")


# Tokenizers, texts and items


@pytest.mark.parametrize(
    "setting",
    [{"tokenizer_class": "BertTokenizer"}, {"tokenizer_class": "LayoutLMv2Tokenizer"}, {"model_max_length": "long"}],
    ids=str,
)
def test_a_tokenizer_that_cannot_read_is_refused(
    setting: dict[str, str], checkpoint: Path, run_bad: Callable[..., str]
) -> None:
    edit_json(checkpoint / "tokenizer_config.json", **setting)
    assert "tokenizer cannot read" in run_bad(*PRUNE)


def test_a_tokenizer_without_vocabulary_is_refused(checkpoint: Path, run_bad: Callable[..., str]) -> None:
    path = checkpoint / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    edit_json(path, **content | {"added_tokens": []})
    run_bad(*PRUNE)


@pytest.mark.parametrize("added", [[], ["eee"]], ids=["text", "added token"])
def test_a_tokenizer_that_would_fill_memory_is_refused(
    added: list[str], checkpoint: Path, run_bad: Callable[..., str]
) -> None:
    """It ended the process; an added token is normalised while the tokenizer is loaded."""
    path = checkpoint / "tokenizer.json"
    content = json.loads(path.read_text())
    bomb = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 100}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
    tokens = content["added_tokens"] + [{"id": 1000 + i, "content": token, **flags} for i, token in enumerate(added)]
    normalizer = {"type": "Sequence", "normalizers": [bomb] * 8}
    edit_json(path, **content | {"normalizer": normalizer, "added_tokens": tokens})
    assert "4e+16 characters" in run_bad(*PRUNE)


@pytest.mark.parametrize("line", [DEEP, json.dumps({"text": "half \ud800 of a pair " * 99})], ids=["deep", "surrogate"])
def test_a_line_that_is_no_text_is_refused(line: str, checkpoint: Path, run_bad: Callable[..., str]) -> None:
    (checkpoint.parent / "t.jsonl").write_text(line + "\n")
    assert "t.jsonl line 1 is no JSON object" in run_bad("profile", "tiny", "--text", "t.jsonl", *QUICK)


ITEM = {"query": "half \ud800", "choices": ["a", "b"], "gold": 0}
ITEMS = [DEEP, ITEM, {"question": "half \ud800", "answer": "#### 3"}]


@pytest.mark.parametrize("item", ITEMS, ids=["deep", "choices", "question"])
def test_an_item_that_is_no_text_is_refused(item: Any, checkpoint: Path, run_bad: Callable[..., str]) -> None:
    (checkpoint.parent / "t.jsonl").write_text(item if isinstance(item, str) else json.dumps(item))
    assert "t.jsonl line 1 is no item" in run_bad("eval", "tiny", "--tasks", "t.jsonl", *TEXT)
    assert "t.jsonl line 1 is no item" in run_bad("hierarchy", "tiny", "tiny", "--choices", "t.jsonl", *TEXT)


def test_a_pair_of_surrogates_is_one_character(checkpoint: Path, run: Callable[..., Done]) -> None:
    (checkpoint.parent / "t.jsonl").write_text(json.dumps({"text": "whole \U0001f407 pairs, one by one; " * 99}))
    assert run("profile", "tiny", "--text", "t.jsonl", *TEXT).code == 0


@pytest.mark.parametrize("content", [DEEP, '{"kind":' * 100_000 + "1" + "}" * 100_000], ids=["list", "object"])
def test_a_result_that_is_nested_too_deep_is_refused(
    content: str, checkpoint: Path, run_bad: Callable[..., str]
) -> None:
    (checkpoint.parent / "p.json").write_text(content)
    assert "it is nested too deep" in run_bad("prune", "tiny", "--plan", "p.json", "-o", "out", *TEXT)
    assert "it is nested too deep" in run_bad("compress", "tiny", "--allocation", "p.json", "-o", "out", *TEXT)
    assert "it is nested too deep" in run_bad("rank", "p.json")


# Arguments, names and paths

LONG = "x" * 5000
STRANGE = os.fsdecode(b"a\xffb")


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", LONG],
        ["profile", "tiny", "--text", f"{LONG}.txt"],
        ["prune", "tiny", "--layers", "1", "-o", LONG],
        ["prune", "tiny", "--plan", LONG, "-o", "out"],
        ["compress", "tiny", "--allocation", LONG, "-o", "out"],
        ["rank", "tiny", "--criterion", LONG],
        ["report", LONG],
        ["profile", STRANGE],
        ["profile", "tiny", "--text", f"{STRANGE}.txt"],
        ["rank", "tiny", "--criterion", STRANGE],
        ["rank", "tiny", f"--{STRANGE}"],
        [STRANGE],
        ["profile", "a\0b"],
        ["profile", "tiny", "--seeds", str(10**30)],
        ["profile", "tiny", "--seeds", str(2**31)],  # a list of them is larger than memory
        ["heal", "tiny", "--teacher", "tiny", "--steps", str(10**30), "-o", "out"],
        ["prune", "tiny", "--layers", str(10**30), "-o", "out"],
    ],
    ids=lambda arguments: " ".join(arguments).replace("\0", "0")[:60],
)
def test_an_argument_out_of_all_bounds_is_refused(arguments: list[str], run_bad: Callable[..., str]) -> None:
    short = [] if arguments[0] in ("report", STRANGE) else TEXT
    assert len(run_bad(*arguments, *short)) < 12_000


@pytest.mark.parametrize("command", [["profile", "tiny", "-o", "l"], ["prune", "tiny", "--layers", "1", "-o", "l"]])
def test_a_loop_of_links_is_refused(command: list[str], checkpoint: Path, run_bad: Callable[..., str]) -> None:
    (checkpoint.parent / "l").symlink_to("l")
    run_bad(*command, *TEXT)


@pytest.mark.parametrize(
    ("pipe", "command"),
    [
        ("p.json", ["prune", "tiny", "--plan", "p.json", "-o", "out"]),
        ("p.json", ["compress", "tiny", "--allocation", "p.json", "-o", "out"]),
        ("p.txt", ["profile", "tiny", "--text", "p.txt"]),
        ("p.jsonl", ["eval", "tiny", "--tasks", "p.jsonl"]),
        ("p.jsonl", ["hierarchy", "tiny", "tiny", "--choices", "p.jsonl"]),
        ("p.gguf", ["profile", "p.gguf"]),
        ("tiny/generation_config.json", ["profile", "tiny"]),
        ("tiny/history.json", ["profile", "tiny"]),
    ],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_nobody_waits_for_a_pipe(pipe: str, command: list[str], checkpoint: Path, run: Callable[..., Done]) -> None:
    place = checkpoint.parent / pipe
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    done = run(*command, *TEXT)
    assert (done.code, done.err.count("\n"), done.changed) == (2, 1, set())


def test_a_model_s_name_is_no_mathematics(checkpoint: Path, run: Callable[..., Done]) -> None:
    checkpoint.rename(checkpoint.parent / "$\\frac$")
    done = run("eval", "$\\frac$", "--speed", "-o", "run", "--tokens", "64", "--context", "32")
    assert (done.code, done.err) == (0, "")
    assert "$\\frac$" in Path("run/report.html").read_text()


# Runs and outputs, before anything is measured.

OTHERS = {
    "profile": ["profile", "tiny"],
    "eval": ["eval", "tiny"],
    "check": ["check", "tiny", "--bounds"],
    "sensitivity": ["sensitivity", "tiny"],
    "hierarchy": ["hierarchy", "tiny"],
    "explain": ["explain", "tiny", "tiny"],
}


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lyapunov_prune.models.loading.load", load)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("command", OTHERS)
def test_a_foreign_file_in_the_run_is_found_before_measuring(
    command: str, checkpoint: Path, run_bad: Callable[..., str]
) -> None:
    folder = checkpoint.parent / "run"
    folder.mkdir()
    (folder / "angular.json").write_text('{"acc": 1}')
    assert "it holds no result" in run_bad(*OTHERS[command], "-o", "run")


def test_a_file_that_the_command_replaces_may_be_anything(checkpoint: Path, run: Callable[..., Done]) -> None:
    (checkpoint.parent / "run").mkdir()
    (checkpoint.parent / "run" / "eval.json").write_text('{"acc": 1}')
    assert run("eval", "tiny", "-o", "run", *TEXT).code == 0
    assert json.loads((checkpoint.parent / "run" / "eval.json").read_text())["kind"] == "Evaluation"


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("output", ["loop", "file", "file/run", "x" * 300])
@pytest.mark.parametrize(
    "command", [*OTHERS.values(), ["rank", "tiny"], ["prune", "tiny", "--layers", "1"]], ids=lambda c: c[0]
)
def test_an_output_that_cannot_be_is_found_before_measuring(
    command: list[str], output: str, checkpoint: Path, run_bad: Callable[..., str]
) -> None:
    (checkpoint.parent / "loop").symlink_to("loop")
    (checkpoint.parent / "file").write_text("")
    run_bad(*command, "-o", output)


@pytest.mark.parametrize("items", ["choices", "tasks"])
def test_an_item_that_is_too_long_is_found_before_measuring(
    items: str, checkpoint: Path, run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("something was measured")

    monkeypatch.setattr("lyapunov_prune.evaluation.perplexity.perplexity", measure)
    monkeypatch.setattr("lyapunov_prune.predictions.hierarchy.probe_layers", measure)
    (checkpoint.parent / "c.jsonl").write_text(json.dumps({"query": "a " * 200, "choices": ["a", "b"], "gold": 0}))
    command = ["eval", "tiny", "--tasks"] if items == "tasks" else ["hierarchy", "tiny", "tiny", "--choices"]
    assert "the model's" in run_bad(*command, "c.jsonl", *TEXT)


@pytest.mark.parametrize("layers", [-1, 10**9, 10**30])
def test_a_plan_of_more_layers_than_can_be_is_refused(
    layers: int, checkpoint: Path, reader: PreTrainedModel, run_bad: Callable[..., str]
) -> None:
    plan = PruningPlan.given(reader, [1]).to_json()
    plan["model"]["num_layers"] = layers
    (checkpoint.parent / "p.json").write_text(json.dumps(plan))
    assert f"no model has {layers} layers" in run_bad("prune", "tiny", "--plan", "p.json", "-o", "out", *TEXT)


@pytest.mark.parametrize("size", [100, 4000, 16384])
@pytest.mark.parametrize("more", [TEXT, ["--device", "disk"]], ids=" ".join)
def test_a_disk_that_fills_at_once_is_one_line(size: int, more: list[str], checkpoint: Path) -> None:
    """In a process of its own, as the limit stays."""
    arguments = [*PRUNE[:6], *more]
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_on_a_small_disk, args=(checkpoint, size, arguments, there)
    )
    process.start()
    assert here.poll(120)
    code, told = here.recv()
    process.join()
    assert code == 2
    assert "failed: " in told
    assert "File too large" in told
    assert told.count("\n") == 1
    assert {path.name for path in checkpoint.parent.iterdir()} == {"tiny"}


def _on_a_small_disk(checkpoint: Path, size: int, arguments: list[str], answer: Connection) -> None:
    os.chdir(checkpoint.parent)
    sys.argv = ["lyapunov-prune", *arguments]
    sys.stdout = sys.stderr = told = io.StringIO()
    limit_file_size(size)
    code: Any = None
    try:
        main()
    except SystemExit as end:
        code = end.code
    answer.send((code, told.getvalue()))


@pytest.mark.parametrize("setting", [{"use_return_dict": False}, {"pad_token_id": 10**9}], ids=str)
def test_transformers_adds_nothing_to_the_one_line(
    setting: dict[str, Any], checkpoint: Path, run_bad: Callable[..., str]
) -> None:
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    edit_json(checkpoint / "config.json", **setting)
    run_bad(*PRUNE)
    logger.removeHandler(handler)
    assert told == []


def test_a_wrong_setting_is_told_before_the_dense_model_writes(run_bad: Callable[..., str]) -> None:
    """run_bad sees that no text was begun."""
    heal = ("heal", "tiny", "--teacher", "tiny", "--text", "self", "-o", "out", *TEXT)
    assert "minutes is 0" in run_bad(*heal, "--minutes", "0")
