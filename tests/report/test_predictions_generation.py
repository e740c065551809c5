"""The figure of two models that write."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from helpers import make_tiny
from transformers import PreTrainedModel

from lyapunov_prune import compare_generation, remove_layers
from lyapunov_prune.predictions import GenerationDivergence
from lyapunov_prune.report.predictions import generation_figure


@pytest.fixture(scope="module")
def measured(llama: PreTrainedModel) -> GenerationDivergence:
    prompts = torch.randint(97, (4, 6), generator=torch.Generator().manual_seed(1))
    return compare_generation(llama, remove_layers(llama, [3]), prompts, steps=6)


def words(text: str) -> set[str]:
    return {word.strip() for word in ElementTree.fromstring(text).itertext()}


def test_the_figure_names_what_it_shows(measured: GenerationDivergence) -> None:
    drawn = words(generation_figure(measured))
    assert {"state", "logits", "probabilities", "cosine similarity", "prompts, %", "decoding step"} <= drawn
    assert {"texts still the same", "texts not ended"} <= drawn


def test_the_same_result_draws_the_same_and_another_one_another(measured: GenerationDivergence) -> None:
    first = generation_figure(measured)
    assert first == generation_figure(measured)
    for name in ("state_similarity", "logit_similarity", "probability_similarity", "running"):
        assert first != generation_figure(replace(measured, **{name: getattr(measured, name) - 0.2})), name
    assert first != generation_figure(replace(measured, compressed_tokens=measured.dense_tokens))


def test_what_was_not_measured_is_not_drawn(measured: GenerationDivergence) -> None:
    other = compare_generation(
        make_tiny("llama"), make_tiny("llama", hidden_size=48), torch.ones(1, 4, dtype=int), steps=1
    )
    assert "state" not in words(generation_figure(other))
    ended = replace(measured, kl=np.append(measured.kl[:-1], np.nan), running=np.append(measured.running[:-1], 0))
    generation_figure(ended)
