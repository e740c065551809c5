"""States that do not fit in memory lie on the disk for as long as they are used, with the same numbers."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from helpers import operated
from transformers import PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune.checkpoints.outline import Outline
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward import states
from lyapunov_prune.forward.hooks import final_state, skipped
from lyapunov_prune.forward.reading import read
from lyapunov_prune.forward.states import each_layer, final_without_each, finals_without_each, room_for
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.streamed import stream_of
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.predictions.divergence import skip_divergence


@torch.no_grad()
def halved_at(decoder: Decoder, ids: torch.Tensor, layers: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """What leaves each of `layers`, whose weights are halved after it."""
    found: dict[int, torch.Tensor] = {}

    def visit(layer: int, outputs: Iterator[torch.Tensor]) -> None:
        found[layer] = torch.cat([output.clone() for output in outputs])
        for p in decoder.layers[layer].parameters():
            p.mul_(0.5)

    each_layer(read(decoder, ids), layers, visit, 1, "layers")
    return found


def test_the_layers_asked_for_are_visited_in_order_wherever_their_weights_are(
    checkpoint: Path, ids: torch.Tensor
) -> None:
    whole, apart = (halved_at(made(checkpoint), ids, (1, 2, 4)) for made in (load, lp.load_streamed))
    assert [*whole] == [*apart] == [1, 2, 4]
    for layer, output in whole.items():
        torch.testing.assert_close(apart[layer], output)
    alone = halved_at(load(checkpoint), ids, (4,))[4]
    assert not torch.allclose(alone, whole[4])


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "free_memory", lambda device: 1000)


def mapped(folder: Path) -> bool:
    return str(folder) in Path("/proc/self/maps").read_text()


def test_final_states_are_those_with_the_layer_skipped(checkpoint: Path, ids: torch.Tensor) -> None:
    whole, apart = load(checkpoint).model, lp.load_streamed(checkpoint).model
    dense, without = final_without_each(wrap(apart), ids, None)
    structure = find_structure(whole)
    with torch.no_grad():
        torch.testing.assert_close(dense, final_state(structure, ids))
        for layer, found in enumerate(without):
            with skipped(structure, (layer,)):
                torch.testing.assert_close(found, final_state(structure, ids))


@torch.no_grad()
def test_final_states_without_each_layer_are_those_in_memory(checkpoint: Path, ids: torch.Tensor) -> None:
    whole, apart = (read(made(checkpoint), ids) for made in (load, lp.load_streamed))
    windows = [
        [pair for part in reading.windows(1) for pair in finals_without_each(reading, part, None, "layers")]
        for reading in (whole, apart)
    ]
    for (wanted, wanted_without), (dense, without) in zip(*windows, strict=True):
        torch.testing.assert_close(dense, wanted)
        for a, b in zip(without, wanted_without, strict=True):
            torch.testing.assert_close(a, b)


def test_a_decoder_that_answers_with_logits_is_measured_too(
    tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path
) -> None:
    make_zoo("llama4_text").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    wanted, found = (skip_divergence(made(tmp_path).model, ids[:, :24]).kl for made in (load, lp.load_streamed))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_all_layers_are_skipped_in_one_reading_of_the_files(
    checkpoint: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, reads, fill = lp.load_streamed(checkpoint).model, list[str](), Outline.fill
    monkeypatch.setattr(Outline, "fill", lambda self, memory, name: reads.append(name) or fill(self, memory, name))
    final_without_each(wrap(apart), ids, None)
    assert sorted(reads) == sorted(name for name in apart.state_dict() if name.startswith("model.layers"))


def test_what_fits_is_in_memory(tmp_path: Path) -> None:
    room = room_for(3, torch.zeros(2, 5, dtype=torch.bfloat16), tmp_path)
    assert (room.shape, room.dtype) == ((3, 2, 5), torch.bfloat16)
    assert not mapped(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_does_not_fit_is_on_the_disk_and_leaves_nothing(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory(monkeypatch)
    room, drawn = room_for(7, torch.zeros(3, 40, dtype=dtype), tmp_path / "run"), torch.randn(7, 3, 40).to(dtype)
    assert mapped(tmp_path)
    assert [*(tmp_path / "run").iterdir()] == []
    room.copy_(drawn)
    assert torch.equal(room, drawn)
    del room
    assert not mapped(tmp_path)


def test_layers_of_several_states_a_token_are_left_out_in_memory_and_on_disk(
    tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path
) -> None:
    """Against the logits of the model whose layer is removed."""
    model = make_zoo("deepseek_v4")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = ids[:1]
    wanted = [softmax_divergence(model, operated(model, [layer]), ids) for layer in range(8)]
    for made in (load, lp.load_streamed):
        np.testing.assert_allclose(skip_divergence(made(tmp_path).model, ids).kl, wanted, rtol=1e-3)


@torch.no_grad()
def softmax_divergence(dense: torch.nn.Module, other: torch.nn.Module, ids: torch.Tensor) -> float:
    p, q = (model(ids).logits[:, :-1].double().log_softmax(-1) for model in (dense, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("criterion", ["kl", "angular"])
def test_rankings_are_the_same_on_the_disk(
    criterion: str, checkpoint: Path, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = lp.load_streamed(checkpoint).model, tmp_path / "run"
    here, seen = lp.rank(model, ids, criterion=criterion, remove=2).plan(2), list[bool]()
    no_memory(monkeypatch)
    made: Any = torch.from_file

    def noted(file: str, **how: Any) -> torch.Tensor:
        seen.append(folder in Path(file).parents)
        return made(file, **how)

    monkeypatch.setattr(torch, "from_file", noted)
    there = lp.rank(model, ids, criterion=criterion, remove=2, folder=folder).plan(2)
    assert seen == [True]
    np.testing.assert_array_equal(here.scores, there.scores)
    assert [path.suffix for path in folder.iterdir()] == [".json"]


@pytest.mark.parametrize("criterion", ["kl", "angular"])
def test_a_disk_that_is_short_is_said_before_a_layer_is_read(
    criterion: str, checkpoint: Path, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lp.load_streamed(checkpoint).model
    stream: Any = stream_of(model)
    before, number = stream.passes, {"kl": 6, "angular": 7}[criterion]
    no_memory(monkeypatch)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(90_000))
    message = f"the states of all layers, .* need {number * 120 * 32 * 4:,} bytes of disk in .* and 90,000 are free"
    with pytest.raises(LyapunovPruneError, match=message):
        lp.rank(model, ids, criterion=criterion, remove=2, folder=tmp_path / "run")
    assert (stream.passes - before, (tmp_path / "run").exists()) == ({"kl": 1, "angular": 0}[criterion], False)


def test_a_disk_that_fills_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory(monkeypatch)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LyapunovPruneError, match=r"4,800 bytes .*No space left"):
        room_for(2, torch.zeros(600), tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_batch_size_is_refused(checkpoint: Path, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match=r"all windows.*batch size"):
        skip_divergence(lp.load_streamed(checkpoint).model, ids, batch_size=2)
