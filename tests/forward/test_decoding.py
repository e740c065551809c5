"""Greedy decoding through a cache against argmax over whole texts."""

from __future__ import annotations

import pytest
import torch
from helpers import make_tiny
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.decoding import continued, greedy_text
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap

STEPS = 12  # longer than what is left of a sliding window of 8


@torch.no_grad()
def whole(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    text = ids
    for _ in range(STEPS):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return text[:, ids.shape[1] :]


def test_every_family_decodes_as_without_a_cache(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    assert torch.equal(continued(read(wrap(model), ids), ids[:, :6], STEPS), whole(model, ids[:, :6]))


def test_a_decoder_without_a_cache_runs_on_the_whole_text(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    wanted = whole(model, ids)
    model.register_forward_hook(lambda module, args, output: output | {"past_key_values": None})
    assert torch.equal(continued(read(wrap(model), ids), ids, STEPS), wanted)


def test_the_generation_config_has_no_say(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    wanted = whole(model, ids)
    model.generation_config.eos_token_id = int(wanted[0, 2])
    model.generation_config.repetition_penalty = 5.0
    assert torch.equal(continued(read(wrap(model), ids), ids, STEPS), wanted)


def test_the_text_of_every_prompt_is_decoded_once(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is known already runs no model."""
    model = make_tiny("llama")
    reading = read(wrap(model), ids[:3, :9])
    found = greedy_text(reading, 2, STEPS)
    assert torch.equal(found, whole(model, ids[:3, :9]))
    monkeypatch.setattr(model, "forward", None)
    assert torch.equal(greedy_text(reading, 2, STEPS, found), found)
    with pytest.raises(LyapunovPruneError, match=r"\(3, 11\)"):
        greedy_text(reading, 2, STEPS, found[:, 1:])
    with pytest.raises(LyapunovPruneError, match="model's 128"):
        read(reading.decoder, reading, 199)
