"""What an experiment measures on a second model lies beside what it measured on the first, and in the same README."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import tables
from helpers import make_tiny, make_tokenizer

from experiments.common import BUILT_IN, Model, of_model, plain

EXPERIMENT = "forward_backward"
RUN = importlib.import_module(tables.module_of(EXPERIMENT))


def test_a_second_model_leaves_the_files_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny("llama", num_hidden_layers=3, vocab_size=260).save_pretrained(tmp_path / "other-0.1b")
    make_tokenizer().save_pretrained(tmp_path / "other-0.1b")
    drawn = np.random.default_rng(0).integers(97, 123, 2000)
    (tmp_path / "text.txt").write_text("".join(map(chr, drawn)), encoding="utf-8")
    here = tmp_path / tables.HOMES[EXPERIMENT].parent.name / EXPERIMENT
    here.mkdir(parents=True)
    first = {path.name: path.read_bytes() for path in RUN.HERE.glob("cumulative.*")}
    for name, content in first.items():
        (here / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RUN, "HERE", here)
    RUN.main(Model("other-0.1b", "cpu"), text="text.txt", tokens=64, context=32)
    assert {path.name: path.read_bytes() for path in here.glob("*.*") if path.is_file()} == first
    assert {path.name for path in (here / "other-0.1b").iterdir()} == set(first)

    monkeypatch.setitem(tables.HOMES, EXPERIMENT, here)
    asked = [f"<!-- {EXPERIMENT}:{model}setting -->\n<!-- end -->\n" for model in ("", "other-0.1b ", "another ")]
    filled = tables.filled("".join(asked[:2]))
    assert [line.split(",")[0] for line in filled.splitlines() if "Losses" in line] == [
        f"Losses: {BUILT_IN}",
        "Losses: other-0.1b",
    ]
    with pytest.raises(KeyError):
        tables.filled(asked[2])


def test_a_folder_is_named_for_the_model_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert of_model(tmp_path, BUILT_IN) == tmp_path
    assert of_model(tmp_path, "google/gemma-3-270m") == tmp_path / "gemma-3-270m"
    (tmp_path / "small.gguf").touch()
    assert of_model(tmp_path, str(tmp_path / "small.gguf")) == tmp_path / "small"
    assert plain(".") == tmp_path.name
