"""Direct error and diverged history against logits in float64, one text and one step at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import hooks_of, logits_of, make_tiny, predictions_by_definition
from scipy.special import softmax
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, compress, probe_layers, remove_layers
from lyapunov_prune.forward import decoding
from lyapunov_prune.forward.decoding import greedy_text
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.predictions import HistoryDivergence, history_divergence
from lyapunov_prune.report.predictions import history_figure
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.result import Result

STEPS, T = 5, 1.3


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    return torch.randint(3, 97, (3, 7), generator=torch.Generator().manual_seed(2))


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    text = list(prompt)
    for _ in range(STEPS):
        text.append(int(logits_of(model, text)[-1].argmax()))
    return text


@torch.no_grad()
def last_state(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    return copy.deepcopy(model).double().base_model(torch.tensor([tokens])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("how", ["rounded", "removed"])
def test_both_readings_are_the_definitions(how: str, llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    other = compress(llama, method="rtn", bits=3).model if how == "rounded" else remove_layers(llama, [2])
    found = history_divergence(llama, other, prompts, steps=STEPS, temperature=T, batch_size=2)
    expected: dict[str, list[np.ndarray]] = {}
    same, flips, spend = [], [], []
    for prompt in prompts.tolist():
        texts = [greedy(model, prompt) for model in (llama, other)]
        z = logits_of(llama, texts[0][:-1])[-STEPS:]
        for text in texts:
            dz = logits_of(other, text[:-1])[-STEPS:] - z
            made = predictions_by_definition(z, dz, T)
            made["logit"] = [
                1 - a @ (a + b) / np.linalg.norm(a) / np.linalg.norm(a + b) for a, b in zip(z, dz, strict=True)
            ]
            h, h2 = (last_state(m, read[:-1])[-STEPS:] for m, read in ((llama, texts[0]), (other, text)))
            made["hidden"] = [1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(h, h2, strict=True)]
            made["logit_change"] = np.linalg.norm(dz, axis=-1) / np.linalg.norm(z, axis=-1)
            flips.append(z.argmax(-1) != (z + dz).argmax(-1))
            for name, values in made.items():
                expected.setdefault(name, []).append(values)
        p = np.sort(softmax(z / T, axis=-1), axis=-1)
        spend.append((p[:, -1] - p[:, -2]) ** 2 / 2)
        same.append([texts[0][: 7 + t] == texts[1][: 7 + t] for t in range(STEPS)])
    for name in ("hidden", "logit", "logit_change", "probability", "probability_estimate", "kl_estimate", "kl"):
        rows = np.array(expected[name]).reshape(3, 2, STEPS).mean(0)
        np.testing.assert_allclose(getattr(found, name), rows, rtol=2e-3, atol=1e-8, err_msg=name)
    np.testing.assert_allclose(found.flipped, np.array(flips).reshape(3, 2, STEPS).mean(0))
    np.testing.assert_allclose(found.may_spend, np.mean(spend, 0), rtol=1e-4)
    np.testing.assert_allclose(found.same_text, np.mean(same, 0))
    assert found.same_text[-1] < 1  # the texts part, or there is nothing to tell apart
    np.testing.assert_allclose(found.var_p, 2 * found.kl_estimate)
    assert (found.running == 1).all()
    assert hooks_of(llama) == hooks_of(other) == 0


def test_while_the_texts_agree_both_readings_are_one(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    other = remove_layers(llama, [2])
    found = history_divergence(llama, other, prompts, steps=STEPS)
    np.testing.assert_allclose(found.kl[0, 0], found.kl[1, 0], rtol=1e-12)
    assert found.kl[0, 0] > 0
    itself = history_divergence(llama, llama, prompts, steps=STEPS)
    assert (itself.kl < 1e-12).all()
    assert (itself.same_text == 1).all()
    history_figure(itself)


def test_a_text_that_has_ended_is_no_longer_counted(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    other = remove_layers(llama, [2])
    text = greedy(llama, prompts[0].tolist())
    before = llama.generation_config.eos_token_id
    llama.generation_config.eos_token_id = text[7 + 1]  # written at step 1
    try:
        found = history_divergence(llama, other, prompts[:1], steps=STEPS)
    finally:
        llama.generation_config.eos_token_id = before
    stop = next(t for t, token in enumerate(text[7:]) if token == text[7 + 1])
    assert found.running.tolist()[: stop + 1] == [1.0] * (stop + 1)
    assert found.running[stop + 1 :].max() == 0
    assert np.isnan(found.kl[:, stop + 1 :]).all()
    assert np.isfinite(found.mean_kl()).all()


def test_texts_that_are_written_are_read_as_they_are(
    llama: PreTrainedModel, prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers as of texts that it decodes itself: here, and in the probe."""
    other = compress(llama, method="rtn", bits=3).model
    readings = [read(wrap(model), prompts) for model in (llama, other)]
    both = [greedy_text(reading, 2, STEPS) for reading in readings]
    asked: list[Callable[..., Result]] = [
        lambda **more: history_divergence(llama, other, prompts, steps=STEPS, batch_size=2, **more),
    ]
    alone = [encode(measure()) for measure in asked]
    probe = encode(probe_layers(llama, prompts, steps=STEPS, batch_size=2))
    monkeypatch.setattr(decoding, "walk", None)
    assert [encode(measure(written=both)) for measure in asked] == alone
    assert encode(probe_layers(llama, prompts, steps=STEPS, batch_size=2, written=both[0])) == probe
    for measure in asked:  # the other text of the two
        assert encode(measure(written=both[::-1])) not in alone
        with pytest.raises(LyapunovPruneError, match="give prompts × steps"):
            measure(written=[text[:, 1:] for text in both])


def test_it_is_saved_drawn_and_refuses_what_cannot_be(
    llama: PreTrainedModel, prompts: torch.Tensor, tmp_path: Path
) -> None:
    found = history_divergence(llama, remove_layers(llama, [2]), prompts, steps=STEPS)
    again = HistoryDivergence.load(found.save(tmp_path / "h.json"))
    assert str(again) == str(found)
    assert history_figure(again) == history_figure(found)
    assert f"state {again.spaces()[0]:.3g}, logits {again.spaces()[1]:.3g}," in again.headline()
    narrow = make_tiny("llama", hidden_size=24)
    assert np.isnan(history_divergence(llama, narrow, prompts, steps=STEPS).hidden).all()
    for wrong in ({"steps": 0}, {"steps": 3, "temperature": 0.0}, {"steps": 500}):
        with pytest.raises(LyapunovPruneError):
            history_divergence(llama, llama, prompts, **wrong)  # type: ignore[arg-type]
