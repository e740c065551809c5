"""Text that a model writes itself: drawn from its own predictions, and the same however it is made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_tiny
from scipy import stats
from transformers import PreTrainedModel

from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.forward import own_text as module
from lyapunov_prune.forward.own_text import self_generated as write_text
from lyapunov_prune.forward.own_text import written_by
from lyapunov_prune.healing.heal import heal
from lyapunov_prune.models.structure import identify
from lyapunov_prune.pruning.removal import remove_layers


@pytest.fixture(scope="module")
def writer() -> PreTrainedModel:
    """In float64, so that how many windows are written at a time decides nothing."""
    model = make_tiny("llama").double()
    model.generation_config.bos_token_id = 5
    return model


def surprise(model: PreTrainedModel, count: int = 2000) -> float:
    """p of the second tokens of so many windows under the model's own prediction, by chi-square."""
    text = write_text(model, tokens=2 * count, context=2, batch_size=500)
    seen = np.bincount(text.ids[:, 1].numpy(), minlength=97)
    with torch.no_grad():
        expected = model(torch.tensor([[5]])).logits[0, -1].softmax(-1).numpy() * count
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def test_tokens_are_drawn_from_the_predictions(writer: PreTrainedModel) -> None:
    assert surprise(writer) > 0.01


def test_later_tokens_go_on_from_what_was_written(writer: PreTrainedModel) -> None:
    """Each is the first at which the running sum of the softmax passes its draw, by forwards without a cache."""
    text = write_text(writer, tokens=24, context=12, seed=3)
    assert (text.ids.shape, text.bos, text.split) == ((2, 12), True, "all")
    assert text.ids[:, 0].tolist() == [5, 5]
    for window, row in enumerate(text.ids):
        draws = np.random.default_rng((3, window)).random(11)
        with torch.no_grad():
            reached = writer(row[None, :-1], use_cache=False).logits[0].softmax(-1).cumsum(-1).numpy()
        assert row[1:].tolist() == [int((line <= u).sum()) for line, u in zip(reached, draws, strict=True)]


def test_as_many_at_a_time_as_one_likes(writer: PreTrainedModel) -> None:
    one, all_ = (write_text(writer, tokens=48, context=8, batch_size=size) for size in (1, 6))
    assert torch.equal(one.ids, all_.ids)
    longer = write_text(writer, tokens=80, context=8)
    assert torch.equal(longer.ids[:6], one.ids)
    assert not torch.equal(write_text(writer, tokens=48, context=8, seed=1).ids, one.ids)


def test_finished_windows_are_not_written_again(
    writer: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_text(writer, tokens=48, context=8)
    drawn = module.continued
    calls: list[int] = []

    def dies(reading: object, prompts: torch.Tensor, steps: int, choose: object) -> torch.Tensor:
        calls.append(len(prompts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return drawn(reading, prompts, steps, choose)

    monkeypatch.setattr(module, "continued", dies)
    with pytest.raises(KeyboardInterrupt):
        write_text(writer, tokens=48, context=8, batch_size=4, folder=tmp_path)
    again = write_text(writer, tokens=48, context=8, batch_size=4, folder=tmp_path)
    assert calls == [4, 2, 2]
    assert torch.equal(again.ids, whole.ids)
    monkeypatch.undo()
    other = write_text(writer, tokens=48, context=8, seed=1, folder=tmp_path)
    assert torch.equal(other.ids, write_text(writer, tokens=48, context=8, seed=1).ids)


def test_a_student_learns_from_it(writer: PreTrainedModel) -> None:
    text = write_text(writer, tokens=256, context=16)
    assert "llama" in text.text.lower()
    report = heal(remove_layers(writer, [2]), writer, text, steps=16, learning_rate=1e-2).report
    assert np.median(report.losses[-4:]) < np.median(report.losses[:4])
    assert report.measured_on.text == text.text


def test_what_begins_a_text(writer: PreTrainedModel) -> None:
    model = make_tiny("llama")
    for settings in (model.generation_config, model.config):
        settings.bos_token_id = settings.eos_token_id = None
    with pytest.raises(LyapunovPruneError, match="begin a text"):
        write_text(model, tokens=8, context=8)
    model.config.eos_token_id = [7, 8]
    assert write_text(model, tokens=8, context=8).ids[0, 0] == 7


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": 8, "context": 9}, "8 tokens do not fill one window of 9"),
        ({"tokens": 8, "context": 1}, "context is 1"),
        ({"tokens": 800, "context": 800}, "lower context"),
        ({"batch_size": 0}, "batch_size"),
        ({"tokens": 8, "context": 8, "temperature": 0.0}, "temperature"),
    ],
)
def test_bad_input(wrong: dict[str, int], message: str, writer: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        write_text(writer, **wrong)


def test_a_temperature_is_that_of_the_softmax(writer: PreTrainedModel) -> None:
    """A colder text is more probable to the model; the batch says of which temperature and seed it is."""
    losses = []
    for temperature in (0.5, 1.0, 2.0):
        text = write_text(writer, tokens=640, context=16, temperature=temperature, seed=3)
        losses.append(perplexity(writer, text).nll)
        assert text.text.endswith(f"temperature {temperature:g}, seed 3)")
    assert losses == sorted(losses)
    digests = identify(writer).weights.values()
    assert any(digest[:12] in text.text for digest in digests)


def test_the_halves_of_what_a_model_writes_share_nothing(writer: PreTrainedModel) -> None:
    first, second = (written_by(writer, split, 64, 16) for split in ("calibration", "evaluation"))
    assert (first.split, second.split) == ("calibration", "evaluation")
    require_disjoint(first, second)
    assert torch.equal(written_by(writer, "all", 64, 16).ids, first.ids)
