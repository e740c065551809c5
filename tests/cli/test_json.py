"""`--json` prints one document and nothing else."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers import COMMANDS, TEXT, Done

from lyapunov_prune.bounds import approximation as approx_module
from lyapunov_prune.cli import demo as demo_module
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.results.result import Result

# Its room gives the function of this name.
attention_paths_module = importlib.import_module("lyapunov_prune.predictions.attention_paths")


# More that say something else in words: `out` is `tiny` with a layer less.
JSON = COMMANDS | {
    "rank --max-kl": ["rank", "tiny", "--criterion", "kl", "--max-kl", "1000", *TEXT],
    "compress --max-kl": ["compress", "tiny", "--method", "rtn", "--max-kl", "1000", "-o", "again", *TEXT],
    "prune --max-kl": ["prune", "tiny", "--criterion", "kl", "--max-kl", "1000", "-o", "again", *TEXT],
    "prune --on-disk": ["prune", "tiny", "--layers", "1", "--on-disk", "-o", "again"],
    "heal": ["heal", "out", "--teacher", "tiny", "--steps", "1", "-o", "healed", *TEXT],
    "eval --speed": ["eval", "out", "--against", "tiny", "--speed", *TEXT],
    "sensitivity --why": ["sensitivity", "tiny", "--study", "removal", "--why", *TEXT],
    "hierarchy": ["hierarchy", "tiny", "out", "--new-tokens", "1", "--tokens", "32", "--context", "16"],
    "explain": ["explain", "tiny", "out", "--tokens", "32", "--context", "16"],
    "report": ["report", "runs/tiny"],
    "theorems": ["theorems"],
    "cache": ["cache"],
}


@pytest.mark.usefixtures("healing_kept")
@pytest.mark.parametrize("name", JSON)
def test_json_is_one_document_and_nothing_else(name: str, run: Callable[..., Done]) -> None:
    if "out" in JSON[name][1:3]:
        run("prune", "tiny", "--layers", "1", "-o", "out", *TEXT)
    if name == "report":
        run(*COMMANDS["profile"])
    done = run(*JSON[name], "--json")
    assert (done.code, done.err) == (0, "")
    assert isinstance(json.loads(done.out), dict)


def test_hierarchy_is_one_document_with_its_parts_by_name(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("items.jsonl").write_text('{"query": "one two", "choices": ["three", "four five"], "gold": 1}\n')
    run("compress", "tiny", "--method", "rtn", "--bits", "8", "-o", "rounded")
    few = ["--tokens", "32", "--context", "16", "--new-tokens", "2", "--choices", "items.jsonl", "--json"]
    done = run("hierarchy", "tiny", "rounded", *few)
    document = json.loads(done.out)
    assert list(document) == ["hierarchy", "generation", "diverged-history", "paths", "choices", "verdict"]
    for name, part in document.items():
        assert part == json.loads(Path(f"runs/tiny/{name}.json").read_text())

    def unseen(*_: object, **__: object) -> NoReturn:
        raise LyapunovPruneError("its attention cannot be seen; take another")

    monkeypatch.setattr(attention_paths_module, "attention_paths", unseen)
    done = run("hierarchy", "tiny", "rounded", *few)
    assert (done.code, done.err) == (0, "no paths through attention: its attention cannot be seen; take another\n")
    assert list(json.loads(done.out)) == ["hierarchy", "generation", "diverged-history", "choices", "verdict"]


def test_demo_is_one_document_with_its_parts_by_name(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    run(*COMMANDS["profile"])
    profile = LayerProfile.load("runs/tiny/profile.json")

    def run_demo(folder: Path, *, resume: bool, show: Callable[[str, Result], None], told: Any) -> Path:
        show("profile", profile)
        return folder / "report.html"

    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    done = run("demo", "--json")
    assert json.loads(done.out) == {"profile": profile.to_json(), "report": "runs/demo/report.html"}
    assert "\n".join(profile.answer()) in run("demo").out


def test_a_violation_is_in_the_document_and_an_exit_code(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    certified = approx_module.certify
    monkeypatch.setattr(approx_module, "certify", lambda W: replace(certified(W), bound=certified(W).bound * 0.99))
    done = run(*COMMANDS["check"], "--json")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert json.loads(done.out) == json.loads(Path("runs/tiny/bounds.json").read_text())
