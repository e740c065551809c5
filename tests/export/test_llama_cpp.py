"""What llama.cpp says is held against the model: another model fails, and a crash is told in a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_tiny

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export import llama_cpp
from lyapunov_prune.export.llama_cpp import engine_check
from lyapunov_prune.models.decoder import Decoder, wrap

INPUTS = [torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))]


def said(decoder: Decoder, prompts: Sequence[list[int]]) -> list[list[dict[str, Any]]]:
    """What an engine without rounding would say."""
    answers = []
    for prompt in prompts:
        with torch.no_grad():
            values, tokens = decoder.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).topk(10)
        top = [{"id": int(t), "logprob": float(v)} for t, v in zip(tokens, values, strict=True)]
        answers.append([{"id": top[0]["id"], "top_logprobs": top}])
    return answers


@pytest.mark.parametrize(("seed", "passes"), [(0, True), (1, False)])
def test_another_model_fails(seed: int, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, smaller, runs = wrap(make_tiny("llama")), wrap(make_tiny("llama")), wrap(make_tiny("llama", seed=seed))
    speaks = {"x.gguf": dense, "y.gguf": runs}
    monkeypatch.setattr(llama_cpp, "_answers", lambda file, prompts: said(speaks[file.name], prompts))
    assert engine_check(Path("x.gguf"), dense, Path("y.gguf"), smaller, INPUTS).passed == passes


def test_a_crash_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "_PROGRAM", tmp_path / "crash.py")
    (tmp_path / "crash.py").write_text("import os; os.abort()")
    with pytest.raises(LyapunovPruneError, match=r"does not run x\.gguf: it ended with -6"):
        llama_cpp._answers(tmp_path / "x.gguf", [[1]])


@pytest.mark.parametrize(("lengths", "whole"), [((64, 1, 0), [64, 1, 0]), ((63, 1, 1), [0, 1, 1]), ((63, 0, 0), None)])
def test_answers_without_parts_of_characters_are_not_compared(
    lengths: tuple[int, ...], whole: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "_PROGRAM", tmp_path / "speaks.py")
    answers = [[{"id": 1, "top_logprobs": []}] * length for length in lengths]
    (tmp_path / "speaks.py").write_text(
        f"import pathlib, sys; pathlib.Path(sys.argv[3]).write_text({json.dumps(answers)!r})"
    )
    if whole is None:
        with pytest.raises(LyapunovPruneError, match="whole characters"):
            llama_cpp._answers(tmp_path / "x.gguf", [[1]] * 3)
    else:
        assert [len(answer) for answer in llama_cpp._answers(tmp_path / "x.gguf", [[1]] * 3)] == whole
