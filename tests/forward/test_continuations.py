"""Log-likelihoods of texts that begin alike are those of each text alone, in float64, and cost what they should."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import hooks_of, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, NonFiniteError
from lyapunov_prune.forward.continuations import Continuations
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import find_structure

BEGINNING = [5, 9, 40, 7, 7, 31, 60, 12, 3, 88, 17, 29]  # longer than a sliding window of the tiny models
TEXTS = [[*BEGINNING, 11, 4, 50], [*BEGINNING, 11, 8], [*BEGINNING, 23, 61, 2, 19, 77]]
SCORED = [3, 2, 4]  # of the last text one token more is context


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def made(model: PreTrainedModel) -> Continuations:
    return Continuations(wrap(model), torch.arange(1, 33)[None])


def exact(model: PreTrainedModel, texts: list[list[int]], scored: list[int]) -> list[tuple[float, bool]]:
    """Each text alone, whole, in float64."""
    wide = copy.deepcopy(model).double()
    answers = []
    for text, count in zip(texts, scored, strict=True):
        log_p = wide(torch.tensor([text]), use_cache=False).logits[0, :-1].log_softmax(-1)[-count:]
        tokens = torch.tensor(text[-count:])
        answers.append((float(log_p.gather(-1, tokens[:, None]).sum()), bool((log_p.argmax(-1) == tokens).all())))
    return answers


def same(found: list[tuple[float, bool]], wanted: list[tuple[float, bool]]) -> None:
    np.testing.assert_allclose([f for f, _ in found], [w for w, _ in wanted], rtol=1e-4, atol=1e-4)
    assert [f for _, f in found] == [w for _, w in wanted]


def test_every_family_gives_what_each_text_gives_alone(family: str) -> None:
    model = make_tiny(family)
    score = made(model)
    for _ in range(2):  # the first time it is tried both ways
        same(score(TEXTS, SCORED), exact(model, TEXTS, SCORED))
    assert score.cached is True
    assert hooks_of(model) == 0


def test_what_is_alike_runs_once_and_logits_are_formed_where_they_count(llama: PreTrainedModel) -> None:
    score = made(llama)
    score(TEXTS, SCORED)
    layer: Any = find_structure(llama).layers[0]
    tokens: list[int] = []
    logits: list[int] = []
    score.scorer.logits = lambda rows, own=score.scorer.logits: (logits.append(len(rows)), own(rows))[1]  # type: ignore[method-assign]
    with hooked(before=[(layer, lambda module, args, kwargs: tokens.append(args[0].shape[:2].numel()))]):
        score(TEXTS, SCORED)
    # From the last token on that no text is scored at, the three run side by side, each without its own last token.
    assert tokens == [len(BEGINNING) - 1, 3 * 5]
    assert sum(logits) == sum(SCORED)


def test_likeliest_tokens_are_told(llama: PreTrainedModel) -> None:
    text = [*BEGINNING]
    for _ in range(3):
        text.append(int(llama(torch.tensor([text])).logits[0, -1].argmax()))
    other = [*text[:-1], (text[-1] + 1) % 97]
    assert [likeliest for _, likeliest in made(llama)([text, other], [3, 3])] == [True, False]


@pytest.mark.parametrize(
    ("texts", "scored"),
    [
        ([[5, 9, 3]], [2]),  # alone
        ([[5, 9], [6, 9]], [1, 1]),  # nothing alike
        ([[5, 9, 3, 7], [5, 9, 3, 8, 1]], [3, 4]),  # alike beyond what is scored
        ([[5, 9, 3], [5, 9, 3]], [1, 1]),  # twice the same
        ([[5, 9, 3], [5, 9, 3, 4]], [1, 2]),  # one begins the other
    ],
)
def test_whatever_is_alike(texts: list[list[int]], scored: list[int], llama: PreTrainedModel) -> None:
    score = made(llama)
    score(TEXTS, SCORED)  # which settles that the cache is good
    same(score(texts, scored), exact(llama, texts, scored))


def test_planted_fault_a_cache_that_lies_is_found_and_left_alone(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Continuations._continued
    monkeypatch.setattr(
        Continuations, "_continued", lambda self, texts, n: own(self, [[6, *text[1:]] for text in texts], n)
    )
    score = made(llama)
    for _ in range(2):
        same(score(TEXTS, SCORED), exact(llama, TEXTS, SCORED))
        assert score.cached is False


def test_a_decoder_without_such_a_cache_runs_every_text_whole(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise AttributeError("no such cache")

    score = made(llama)
    monkeypatch.setattr(Continuations, "_continued", refuses)
    same(score(TEXTS, SCORED), exact(llama, TEXTS, SCORED))
    assert score.cached is False


def test_blocks_of_rows_do_not_show(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(llama)(TEXTS, SCORED)
    monkeypatch.setattr(Scorer, "split", lambda self, *of: zip(*(each.split(2) for each in of), strict=True))
    same(made(llama)(TEXTS, SCORED), whole)


def test_numbers_that_are_none_are_refused() -> None:
    model: Any = make_tiny("llama")
    score = made(model)
    model.model.layers[3].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="output of layer 3"):
        score(TEXTS, SCORED)
    model = make_tiny("llama")
    score = made(model)
    model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(LyapunovPruneError, match="NaN"):
        score(TEXTS, SCORED)
