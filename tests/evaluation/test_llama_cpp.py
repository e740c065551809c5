"""llama.cpp in its own process: what it computes, and that a crash, a hang or its absence is told in a line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, make_tiny, write_gguf

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation import llama_cpp
from lyapunov_prune.evaluation.llama_cpp import ask, installed
from lyapunov_prune.models.loading import load

IDS = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path / "cache"))
    return write_gguf(make_tiny("llama", vocab_size=len(VOCABULARY)), tmp_path / "x.gguf")


@pytest.mark.skipif(not installed(), reason="needs xllamacpp")
def test_its_predictions_are_the_models_whatever_the_batch(file: Path) -> None:
    model = load(file).model
    for batch in (32, 256):
        first, second = (
            made.windows for made in ask([file, file], IDS, greedy=3, top=5, batch=batch, timed=IDS[0], prompt=30)
        )
        for ids, said, again in zip(IDS, first, second, strict=True):
            assert said.ids[:40].tolist() == ids
            assert np.array_equal(said.values, again.values)
            with torch.no_grad():
                logs = model(torch.from_numpy(said.ids.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
            after = logs.gather(1, torch.from_numpy(said.ids[1:].astype(np.int64))[:, None])[:, 0]
            assert np.allclose(said.next, after, atol=2e-2)
            assert np.allclose(said.values, logs.topk(5).values, atol=2e-2)
            assert said.ids[40:].tolist() == logs[39:].argmax(-1).tolist()


@pytest.mark.skipif(not installed(), reason="needs xllamacpp")
def test_it_is_timed(file: Path) -> None:
    (made,) = ask([file], IDS[:1], timed=IDS[1], prompt=36, repeats=2)
    assert made.seconds.shape == (2, 1 + 4)
    assert (made.seconds > 0).all()


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import os; os.abort()", r"does not run x\.gguf: it ended with -6"),
        ("import sys; sys.exit('some error: no such thing')", "some error: no such thing"),
        ("import time; time.sleep(60)", r"x\.gguf: it was not done within 1 s"),
    ],
)
def test_a_crash_and_a_hang_are_told(
    program: str, told: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(llama_cpp, "_PROGRAM", tmp_path / "program.py")
    monkeypatch.setattr(llama_cpp, "_SECONDS", 1.0 if "sleep" in program else 60.0)
    monkeypatch.setattr(llama_cpp, "installed", lambda: True)
    with pytest.raises(LyapunovPruneError, match=told):
        ask([file], [[1, 2]])


def test_without_xllamacpp_it_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LyapunovPruneError, match=r"lyapunov-prune\[engines\]"):
        ask([file], [[1, 2]])
