"""The process without this package runs the module in the folder: it sees what that says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from helpers import LAYERS, edit_json, make_tiny

from lyapunov_prune.checkpoints import reloading
from lyapunov_prune.checkpoints.reloading import elsewhere_check
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.models.compact import MODULE


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have it, not forked from another."""
    monkeypatch.setattr(reloading, "subprocess", subprocess)


def test_a_module_that_needs_this_package_fails(tmp_path: Path) -> None:
    model = make_compact(make_tiny("llama"), Cuts((1,)))
    model.save_pretrained(tmp_path)
    text = (tmp_path / MODULE).read_text()
    (tmp_path / MODULE).write_text(text.replace("import torch\n", "import torch\nimport lyapunov_prune\n", 1))
    check = elsewhere_check(model, tmp_path, [torch.arange(8).unsqueeze(0)])
    assert not check.passed
    assert "lyapunov_prune" in check.detail


def test_keys_that_are_missing_without_this_package_are_named(tmp_path: Path) -> None:
    model = make_compact(make_tiny("llama"), Cuts((1,)))
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", cuts=[{}] * 6)
    check = elsewhere_check(model, tmp_path, [torch.arange(8).unsqueeze(0)])
    assert not check.passed
    assert "missing keys without this package, first model.layers.1." in check.detail


def test_the_other_process_puts_the_model_where_this_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ("embed_tokens", "rotary_emb", "norm", *(f"layers.{i}" for i in range(LAYERS)))
    places = {**{f"model.{part}": "cpu" for part in parts}, "lm_head": "cpu"}
    model = make_compact(dispatch_model(make_tiny("llama"), places, force_hooks=True), Cuts((1,)))
    model.save_pretrained(tmp_path / "compact")
    told: list[object] = []
    run = subprocess.run

    def noted(command: list[str], **options: Any) -> Any:
        told.append(json.loads((Path(command[-1]) / "asked.json").read_text())["device"])
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", noted)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("given back"))
    check = elsewhere_check(model, tmp_path / "compact", [torch.arange(8).unsqueeze(0)])
    assert (check.passed, check.measured) == (True, 0.0), check.detail
    assert told == ["given back", places]
