"""Which windows choose the layers."""

from __future__ import annotations

import pytest
import torch
from helpers import make_tiny
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from experiments.cut_texts import MODULES
from lyapunov_prune.data import text
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.text import load_text
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.results.history import add_step
from lyapunov_prune.shrinking.texts import Texts, foreign_text, wide_context


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


def test_a_text_too_short_to_decide_by_is_refused_before_anything_is_measured() -> None:
    model = make_tiny("llama")
    ids = torch.arange(60 * 24).view(60, 24) % 97
    learn, judge = (TokenBatch(part, "given", "all", bos=False) for part in (ids[:40], ids[40:].flip(1)))
    Texts(learn, judge.take(range(4)), None, 9600, 24, learn.take(range(8))).require(model)
    for choose, few in ((8, 3), (7, 4)):
        with pytest.raises(LyapunovPruneError, match="too few windows"):
            Texts(learn, judge.take(range(few)), None, 9600, 24, learn.take(range(choose))).require(model)


def test_the_foreign_text_is_of_a_kind_that_no_step_has_read(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    prose, code, own = (
        load_text(source, tokenizer, tokens=480, context=48, split="evaluation")
        for source in ("builtin", "code", [" ".join(f"w{i}" for i in range(9000))])
    )
    for used, expected in (([own], "builtin"), ([own, prose], "code"), ([code, own], "builtin"), ([prose, code], None)):
        found = foreign_text(reader, tokenizer, used, own)
        assert (None if found is None else found.text) == expected
    taught = make_tiny("llama", vocab_size=reader.config.vocab_size)
    add_step(taught, "heal", (prose.measured_on(taught),), taught)  # the same passages, under whatever name
    found = foreign_text(taught, tokenizer, [own], own)
    assert found is not None
    assert (found.text, found.split, found.tokens, found.context) == ("code", "evaluation", 480, 48)


def test_no_module_of_the_text_code_is_in_the_code_that_experiments_report_on() -> None:
    assert not set(MODULES) & set(text._MODULES)
