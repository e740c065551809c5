"""What llama.cpp computes with a GGUF file is held against the model: right files pass, wrong ones fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, make_tiny, write_gguf

from lyapunov_prune.evaluation.llama_cpp import Answers, Predictions, installed
from lyapunov_prune.export import llama_cpp
from lyapunov_prune.export.llama_cpp import engine_check, stretches
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.gguf_copy import Piece, pieces_of, write_pieces
from lyapunov_prune.models.gguf_header import number, read_header
from lyapunov_prune.models.loading import load

engine = pytest.mark.skipif(not installed(), reason="needs xllamacpp")
IDS = torch.randint(97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path / "cache"))


def tiny_file(family: str, folder: Path, packed: bool = True) -> Path:
    sizes = {"head_dim": 128} if family == "qwen3" else {}
    model = make_tiny(family, vocab_size=len(VOCABULARY), **sizes)
    values = {"attention.sliding_window_pattern": 3} if family == "gemma3" else {}
    return write_gguf(model, folder / "x.gguf", packed=packed, values=values)


def planted(file: Path, values: dict[str, int], moved: Callable[[str], str] = lambda name: name) -> Path:
    """The file with other numbers in its header, or the bytes of tensors under other names."""
    header = read_header(file)
    changed = {f"{header.architecture}.{key}": number(value) for key, value in values.items()}
    pieces = {piece.name: piece for piece in pieces_of(header, range(header.layers), {})}
    target = file.with_name("y.gguf")
    write_pieces(
        target,
        dict(header.values) | changed,
        [Piece(name, pieces[moved(name)].source) for name in pieces],
        header.alignment,
    )
    return target


@engine
@pytest.mark.parametrize(("family", "packed"), [*((family, True) for family in FAMILIES), ("gemma3", False)])
def test_a_right_file_passes_with_room(family: str, packed: bool, tmp_path: Path) -> None:
    file = tiny_file(family, tmp_path, packed)
    check = engine_check(file, load(file), IDS)
    assert check.passed
    assert check.measured < 0.8


def swapped(name: str) -> str:
    """Layers 2 and 3 change places."""
    return name.replace("blk.2.", "blk.x.").replace("blk.3.", "blk.2.").replace("blk.x.", "blk.3.")


@engine
@pytest.mark.parametrize(
    ("family", "values", "moved"),
    [
        ("gemma3", {"attention.sliding_window": 4}, str),
        ("gemma3", {"attention.sliding_window": 9}, str),
        ("gemma3", {"attention.sliding_window": 16}, str),
        ("gemma3", {"attention.sliding_window": 1000}, str),
        ("gemma3", {"attention.sliding_window_pattern": 2}, str),
        ("gemma3", {"attention.sliding_window_pattern": 4}, str),
        ("gemma3", {}, swapped),
        ("llama", {}, swapped),
        ("llama", {}, lambda name: name.replace("blk.4.", "blk.5.")),
        ("qwen2", {}, swapped),
    ],
)
def test_a_wrong_window_order_or_layer_fails_clearly(
    family: str, values: dict[str, int], moved: Callable[[str], str], tmp_path: Path
) -> None:
    file = tiny_file(family, tmp_path)
    check = engine_check(planted(file, values, moved), load(file), IDS)
    assert not check.passed
    assert check.measured > 3


@engine
def test_a_window_that_is_a_little_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "_TIMES", 1e6)  # as if no prediction told
    file = tiny_file("gemma3", tmp_path)
    check = engine_check(planted(file, {"attention.sliding_window": 9}), load(file), IDS)
    assert not check.passed
    assert check.detail.startswith("its sliding window is 9 in llama.cpp, and 8 in the model")


@engine
def test_a_file_that_llama_cpp_does_not_run_fails_the_gate(tmp_path: Path) -> None:
    file = tiny_file("llama", tmp_path)
    decoder = load(file)
    check = engine_check(planted(file, {"embedding_length": 7}), decoder, IDS)
    assert not check.passed
    assert check.detail.startswith("llama.cpp does not run y.gguf")


def exact(decoder: Decoder, ids: list[int]) -> Predictions:
    """What an engine without rounding would say; the last 64 tokens count as written by it."""
    with torch.no_grad():
        logs = decoder.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    values, tokens = logs.topk(64)
    after = logs.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    return Predictions(np.array(ids), after.numpy(), tokens.numpy(), values.numpy())


@pytest.mark.parametrize(("seed", "passes"), [(0, True), (1, False)])
def test_another_model_fails(seed: int, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, runs = wrap(make_tiny("llama")), wrap(make_tiny("llama", seed=seed))
    given: Any = lambda *_, **__: [Answers((exact(runs, IDS * 3),), np.empty((0, 0)), 0)]  # noqa: E731
    monkeypatch.setattr(llama_cpp, "ask", given)
    file = write_gguf(make_tiny("llama", vocab_size=len(VOCABULARY)), tmp_path / "x.gguf", packed=True)
    assert engine_check(file, decoder, (IDS * 3)[:-64]).passed == passes


def test_every_stretch_of_a_text_is_judged_on_its_own() -> None:
    assert list(stretches(8, 20, 83).values()) == [slice(0, 8), slice(8, 19), slice(19, 83)]
    assert list(stretches(256, 20, 83).values()) == [slice(0, 19), slice(19, 19), slice(19, 83)]
