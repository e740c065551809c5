"""Perplexity and speed in llama.cpp: the same windows as here, and what cannot be run is told in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import VOCABULARY, Done, make_tiny, saved, write_gguf

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation import engine, llama_cpp
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.evaluation.llama_cpp import installed
from lyapunov_prune.models.loading import load

ASKED = ("--speed", "--tokens", "96", "--context", "48")


@pytest.fixture
def file(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
    write_gguf(make_tiny("llama", vocab_size=len(VOCABULARY)), Path("dense.gguf"), packed=True)
    return write_gguf(make_tiny("llama", seed=1, vocab_size=len(VOCABULARY)), Path("x.gguf"), packed=True)


@pytest.mark.skipif(not installed(), reason="needs xllamacpp")
def test_the_same_windows_have_the_same_losses_there(file: Path, run: Callable[..., Done]) -> None:
    done = run("eval", "x.gguf", "--against", "dense.gguf", *ASKED, "-o", "out")
    assert not done.code, done.err
    found = Evaluation.load("out/eval.json")
    assert found.engine is not None
    for there, here in zip(found.engine.perplexities, found.perplexities, strict=True):
        assert np.allclose(there.windows, here.windows, atol=0.02)
        assert there.measured_on == here.measured_on
    assert found.engine.perplexities[0].nll != found.engine.perplexities[1].nll
    assert found.engine.types == ("Q8_0", "Q8_0")
    assert all(row.prefill > 0 and row.decode > 0 for row in found.engine.rows)
    assert "In llama.cpp: perplexity" in done.out


@pytest.mark.skipif(not installed(), reason="needs xllamacpp")
def test_another_loss_there_fails(file: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SAME", 0.0)
    done = run("eval", "x.gguf", *ASKED, "-o", "out")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert Evaluation.load("out/eval.json").engine is not None


def test_a_file_is_measured_beside_a_folder_with_more_special_tokens(
    file: Path, run: Callable[..., Done], tmp_path: Path
) -> None:
    named = load("x.gguf").tokenizer
    named.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    model = make_tiny("llama", vocab_size=len(named) + 8)
    saved(model, named, tmp_path / "dense")
    for pair in (("x.gguf", "--against", "dense"), ("dense", "--against", "x.gguf")):
        done = run("eval", *pair, "--tokens", "96", "--context", "48")
        assert done.code == 0, done.err


def test_an_engine_that_crashes_hangs_or_is_absent_is_one_line(
    file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    run: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "require_extra", lambda *_: None)
    place = tmp_path_factory.mktemp("programs") / "program.py"
    monkeypatch.setattr(llama_cpp, "_PROGRAM", place)
    monkeypatch.setattr(llama_cpp, "_SECONDS", 2.0)
    for program, told in (
        ("os.abort()", "it ended with -6"),
        ("time.sleep(60)", "x.gguf: it was not done within 2 s"),
    ):
        place.write_text(f"import os, time; {program}")
        done = run("eval", "x.gguf", *ASKED)
        assert (done.code, told in done.err, done.err.count("\n")) == (0, True, 1), done

    def absent(*_: object) -> None:
        raise LyapunovPruneError("xllamacpp is not installed")

    monkeypatch.setattr(engine, "require_extra", absent)
    assert "not run in llama.cpp: xllamacpp is not installed" in run("eval", "x.gguf", *ASKED).err


def test_llama_cpp_runs_only_where_every_model_is_its_file(
    file: Path, checkpoint: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "require_extra", lambda *_: None)
    assert engine.engine_files(["x.gguf", str(checkpoint)]) == []
    assert engine.engine_files(["x.gguf", "dense.gguf"]) == [Path("x.gguf"), Path("dense.gguf")]
