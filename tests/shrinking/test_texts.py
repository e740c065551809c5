"""Which windows choose the layers."""

from __future__ import annotations

import pytest
import torch
from helpers import make_tiny

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.shrinking.texts import Texts, wide_context


@pytest.mark.parametrize(
    ("tokens", "context", "wide"),
    [
        (16 * 128, 32, 128),  # the longest context of the model, below 512
        (16 * 128 - 1, 32, 32),  # too few such windows
        (16 * 128, 128, 128),
    ],
)
def test_windows_are_as_wide_as_the_tokens_and_the_model_allow(tokens: int, context: int, wide: int) -> None:
    model = make_tiny("llama")
    assert wide_context(find_structure(model), tokens, context) == wide
    assert Texts(None, None, None, tokens, context).searched(model) == (min(16, tokens // wide), wide)


def test_a_given_text_is_as_wide_as_it_is() -> None:
    model = make_tiny("llama")
    batch = TokenBatch(torch.arange(20 * 24).view(20, 24) % 97, "given", "all", bos=False)
    assert Texts(batch, None, None, 9600, 24).searched(model) == (16, 24)
    assert Texts(batch, None, None, 9600, 24, choose=batch.take(range(5))).searched(model) == (5, 24)
