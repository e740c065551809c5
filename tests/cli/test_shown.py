"""What commands show on stdout is also kept in files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import COMMANDS, Done

from lyapunov_prune.cli import demo as demo_module
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.results.result import Result


def test_hierarchy_keeps_every_part_under_its_name(run: Callable[..., Done]) -> None:
    Path("items.jsonl").write_text('{"query": "one two", "choices": ["three", "four five"], "gold": 1}\n')
    run("compress", "tiny", "--method", "rtn", "--bits", "8", "-o", "rounded")
    few = ["--tokens", "32", "--context", "16", "--new-tokens", "2", "--choices", "items.jsonl"]
    parts = ["hierarchy", "generation", "diverged-history", "choices", "verdict"]
    done = run("hierarchy", "tiny", "rounded", *few)
    assert re.findall(r"^Written: runs/tiny/(\S+)\.json$", done.out, re.M) == parts


def test_demo_answers_as_profile_does(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    run(*COMMANDS["profile"])
    profile = LayerProfile.load("runs/tiny/profile.json")

    def run_demo(folder: Path, *, show: Callable[[str, Result], None], told: Any) -> Path:
        show("profile", profile)
        return folder / "report.html"

    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    done = run("demo")
    assert "\n".join(profile.answer()) in done.out
    assert "\nReport: runs/demo/report.html\n" in done.out
