"""`export` writes what --output names, and refuses in a line what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Done

from lyapunov_prune.export import llama_cpp
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.loading import load


@pytest.fixture(autouse=True)
def _without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)


def test_a_file_and_a_folder(run: Callable[..., Done]) -> None:
    done = run("export", "tiny", "-o", "a.gguf", "--quantize", "q8_0")
    assert done.code == 0
    assert done.changed == {"a.gguf"}
    assert "Q8_0" in done.out
    assert read_header(Path("a.gguf")).read("general.file_type") == 7
    assert run("export", "a.gguf", "-o", "b").code == 0
    assert load("b").structure.num_layers == load("tiny").structure.num_layers


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("export tiny -o tiny", "is not empty"),
        ("export tiny -o x.gguf --format plain", "--format does not fit x.gguf"),
        ("export tiny -o x --format gguf", "end --output in .gguf"),
        ("export tiny -o x.gguf --quantize q4_k_m", "for '--quantize': 'q4_k_m' is not one of 'f32'"),
        ("export tiny -o x --quantize q8_0", "--quantize applies to a GGUF file"),
        ("export tiny -o x --format packed", "packed"),
        ("export absent -o x.gguf", "absent"),
        ("compress tiny --sparsity 0.5 -o x.gguf", "write a folder and export that"),
    ],
)
def test_what_cannot_be_is_refused(command: str, told: str, run_bad: Callable[..., str]) -> None:
    assert told in run_bad(*command.split())
