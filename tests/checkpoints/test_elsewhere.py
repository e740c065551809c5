"""The process without this package runs the module in the folder: it sees what that says."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import edit_json, make_tiny

from lyapunov_prune.checkpoints.elsewhere import elsewhere_check
from lyapunov_prune.models.compact import MODULE
from lyapunov_prune.pruning.compact import Cuts, make_compact


def test_a_module_that_needs_this_package_fails(tmp_path: Path) -> None:
    model = make_compact(make_tiny("llama"), Cuts((1,)))
    model.save_pretrained(tmp_path)
    text = (tmp_path / MODULE).read_text()
    (tmp_path / MODULE).write_text(text.replace("import torch\n", "import torch\nimport lyapunov_prune\n", 1))
    check = elsewhere_check(model, tmp_path, [torch.arange(8).unsqueeze(0)])
    assert not check.passed
    assert "lyapunov_prune" in check.detail


def test_without_inputs_names_and_shapes_are_compared(tmp_path: Path) -> None:
    model = make_compact(make_tiny("llama"), Cuts((1,)))
    model.save_pretrained(tmp_path)
    check = elsewhere_check(model, tmp_path, [])
    assert (check.passed, check.detail) == (True, "names and shapes in a process without this package")
    edit_json(tmp_path / "config.json", cuts=[{}] * 6)
    check = elsewhere_check(model, tmp_path, [])
    assert not check.passed
    assert "missing keys without this package, first model.layers.1." in check.detail
