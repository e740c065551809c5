"""A reading: made once, handed on, and nothing run before it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import as_batch, hooks_of, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, block_influence, compress, perplexity
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.profiles.profile import profile_layers


def test_a_reading_comes_back_as_it_is(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    reading = read(wrap(llama), ids)
    assert read(wrap(llama), reading) is reading
    assert torch.equal(torch.cat(reading.windows(2)), ids)
    assert reading.structure.layers is llama.model.layers


def test_another_model_reads_the_same_tokens_anew(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    reading, other = read(wrap(llama), ids), make_tiny("gpt2")
    again = read(wrap(other), reading)
    assert again.model is other
    assert again.structure.layers is other.transformer.h
    assert again.batch is reading.batch
    with pytest.raises(LyapunovPruneError, match="model's 128"):
        read(wrap(llama), torch.zeros(1, 129, dtype=torch.int64))


def test_nothing_runs_before_it_is_asked_for(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    runs: list[Any] = []
    with hooked(before=[(llama.model, lambda *call: runs.append(call))]):
        reading = read(wrap(llama), ids)
        assert not runs
        prefix, scorer = reading.prefix, reading.scorer
        count = len(runs)
        assert count > 0
        assert reading.prefix is prefix
        assert reading.scorer is scorer
        assert len(runs) == count
    assert hooks_of(llama) == 0
    with torch.no_grad():
        losses, _ = scorer(reading.windows(3)[0])
    assert losses == pytest.approx(perplexity(llama, ids).windows[:3], rel=1e-5)


def test_it_says_what_was_measured_on(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    reading = read(wrap(llama), ids)
    assert reading.measured_on(seed=3) == as_batch(llama, ids).measured_on(llama, seed=3)
    assert reading.measured_on() == as_batch(llama, ids).measured_on(llama)


def test_measurements_take_a_reading_for_a_batch(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    reading = read(wrap(llama), ids)
    assert (block_influence(llama, reading).influence == block_influence(llama, ids).influence).all()
    small = compress(llama, reading, method="wanda", sparsity=0.5)
    wanted = compress(llama, ids, method="wanda", sparsity=0.5)
    assert small.report.calibration == wanted.report.calibration
    pairs = zip(small.model.parameters(), wanted.model.parameters(), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for every reading that is made."""
    from lyapunov_prune.forward import reading as module

    made: list[Any] = []
    check = module.checked_batch
    monkeypatch.setattr(module, "checked_batch", lambda *given: made.append(given) or check(*given))
    return made


def test_both_halves_of_a_profile_share_one_reading(
    llama: PreTrainedModel, ids: torch.Tensor, readings: list[Any]
) -> None:
    profile = profile_layers(llama, ids, seeds=[0])
    assert len(readings) == 1
    assert profile.contraction.measured_on.text_hash == profile.influence.measured_on.text_hash


def test_a_reading_is_of_one_model_and_batch(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    assert read(wrap(llama), ids) != read(wrap(llama), ids)  # not compared tensor by tensor
    assert isinstance(read(wrap(llama), as_batch(llama, ids)), Reading)
