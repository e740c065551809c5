"""The verdict by kind of task: every number is that of a measurement, and words go by the interval alone."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ITEMS, example
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import LyapunovPruneError, compress, remove_layers
from lyapunov_prune.predictions import Verdict, compare_choices, history_divergence, task_verdict
from lyapunov_prune.predictions.generation import compare_generation
from lyapunov_prune.predictions.verdict import KindVerdict, wilson
from lyapunov_prune.report.predictions import verdict_figure

STEPS = 4


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    return torch.randint(3, 250, (3, 7), generator=torch.Generator().manual_seed(2))


def test_every_number_is_of_a_measurement(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: torch.Tensor, tmp_path: Path
) -> None:
    other = compress(reader, method="rtn", bits=3).model
    generation = compare_generation(reader, other, prompts, steps=STEPS)
    history = history_divergence(reader, other, prompts, steps=STEPS)
    choices = compare_choices(reader, other, ITEMS, tokenizer)
    found = task_verdict(generation, history, choices=choices)
    assert [k.task for k in found.kinds] == ["choice", "generation"]
    option, whole = found.kinds
    assert np.isnan(option.returns)
    assert option.same == choices.survival(per_character=True)
    assert option.distance == choices.text_kl(per_character=True).mean() != choices.text_kl().mean()
    rows = zip(choices.dense, choices.compressed, choices.characters, strict=True)
    scored = [(np.array(a) / np.array(n), np.array(b) / np.array(n)) for a, b, n in rows]
    leads = [np.sort(a)[-1] - np.sort(a)[-2] for a, _ in scored]
    shifts = [(b - a).max() - (b - a).min() for a, b in scored]
    assert option.moved == pytest.approx(np.median(shifts))
    assert option.may_move == pytest.approx(np.median(leads))
    assert option.certain == np.mean(np.array(shifts) < np.array(leads))
    assert whole.same == pytest.approx(np.mean(generation.first_difference) / STEPS)
    assert whole.returns == pytest.approx(history.kl[1].mean() / history.kl[0].mean())
    assert whole.items == 3
    again = Verdict.load(found.save(tmp_path / "v.json"))
    assert str(again) == str(found)
    assert verdict_figure(again) == verdict_figure(found)
    assert "choice: " in found.headline()
    few = task_verdict(generation, history)
    assert "give --choices FILE" in few.headline()
    of_another = history_divergence(reader, remove_layers(reader, [2]), prompts, steps=STEPS)
    with pytest.raises(LyapunovPruneError, match="one pair"):
        task_verdict(generation, of_another)


def test_medians_and_means_are_of_the_compressed_model_on_the_dense_text(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: torch.Tensor
) -> None:
    """By hand: choices of two answers of one character, three steps and one at which none runs."""
    history = replace(
        history_divergence(reader, reader, prompts, steps=STEPS),
        kl=np.array([[1.0, 2.0, 6.0, np.nan], [2.0, 4.0, 12.0, np.nan]]),
        may_spend=np.array([0.5, 1.0, 4.5, np.nan]),
        certain=np.array([[1.0, 0.0, 0.0, np.nan], [1.0, 1.0, 1.0, np.nan]]),
        running=np.array([1.0, 1.0, 1.0, 0.0]),
    )
    choices = compare_choices(reader, reader, ITEMS, tokenizer)
    n = len(choices.gold)
    choices = replace(
        choices,
        characters=((1.0, 1.0),) * n,
        dense=((0.0, -2.0),) * n,
        compressed=((-1.0, -1.0), *((0.0, -2.0),) * (n - 1)),  # the first moves by as much as the lead
    )
    generation = compare_generation(reader, reader, prompts, steps=STEPS)
    option, whole = task_verdict(generation, history, choices=choices).kinds
    assert option.certain == (n - 1) / n
    assert (whole.moved, whole.may_move, whole.certain) == (2.0, 1.0, pytest.approx(1 / 3))
    assert (whole.distance, whole.returns) == (3.0, 2.0)


def test_a_model_against_itself_stays_and_is_certain(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: torch.Tensor
) -> None:
    generation = compare_generation(reader, reader, prompts, steps=STEPS)
    history = history_divergence(reader, reader, prompts, steps=STEPS)
    choices = compare_choices(reader, reader, ITEMS, tokenizer)
    found = task_verdict(generation, history, choices=choices)
    assert all(k.same == 1 and k.certain == 1 for k in found.kinds)
    option, whole = found.kinds
    assert option.sentence().endswith("no error returns through generated text")
    assert whole.sentence().endswith("there is no error to grow through its own text")
    assert all(k.word == "changes" for k in found.kinds)  # three prompts and four items say no more


def test_a_step_counts_for_the_prompts_that_run_in_it(reader: PreTrainedModel, prompts: torch.Tensor) -> None:
    generation = compare_generation(reader, reader, prompts, steps=4)
    history = history_divergence(reader, reader, prompts, steps=4)
    certain = np.broadcast_to([0.25, 0.25, 1.0, np.nan], history.certain.shape)
    ending = replace(history, certain=certain, running=np.array([1.0, 1.0, 0.5, 0.0]))
    assert task_verdict(generation, ending).kinds[0].certain == (0.25 + 0.25 + 0.5) / 2.5  # of 2.5 decisions a prompt


def test_what_stays_of_texts_that_end_does_not_depend_on_the_steps(
    reader: PreTrainedModel, prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = compress(reader, method="rtn", bits=3).model
    written = compare_generation(reader, other, prompts, steps=8).dense_tokens
    monkeypatch.setattr(reader.generation_config, "eos_token_id", [text[2] for text in written])
    found = []
    for steps in (4, 8):
        generation = compare_generation(reader, other, prompts, steps=steps)
        found.append(task_verdict(generation, history_divergence(reader, other, prompts, steps=steps)).kinds[0].same)
        assert all(len(text) < 4 for text in generation.dense_tokens)
    assert found[0] == found[1] < 1


def test_what_is_certain_did_not_flip(reader: PreTrainedModel, prompts: torch.Tensor) -> None:
    """Pinsker's inequality, at every step of every prompt by itself, and at a temperature."""
    for bits, T in itertools.product((3, 4, 8), (1.0, 0.5)):
        other = compress(reader, method="rtn", bits=bits).model
        for ids in prompts:
            found = history_divergence(reader, other, ids[None], steps=STEPS, temperature=T)
            for row in range(2):
                at = found.certain[row] > 0
                assert ((found.kl[row] < found.may_spend) == at).all()
                assert (found.flipped[row, at] == 0).all()
    assert found.certain.any()


@pytest.mark.parametrize(("same", "n", "word"), [(1.0, 200, "stays"), (1.0, 10, "changes"), (0.3, 200, "lost")])
def test_words_go_by_the_interval(same: float, n: int, word: str) -> None:
    one: KindVerdict = example(KindVerdict, itertools.cycle([0.25]))
    low, high = wilson(same, n)
    assert replace(one, same=same, low=low, high=high).word == word


def test_an_interval_that_begins_at_the_limit_stays_and_one_that_ends_there_is_not_lost() -> None:
    one: KindVerdict = example(KindVerdict, itertools.cycle([0.25]))
    assert replace(one, low=0.9, high=1.0).word == "stays"
    assert replace(one, low=0.0, high=0.5).word == "changes"


@pytest.mark.parametrize(("k", "n"), [(0, 7), (3, 7), (7, 7), (40, 50)])
def test_the_interval_is_wilsons(k: int, n: int) -> None:
    wanted = stats.binomtest(k, n).proportion_ci(method="wilson")
    found = wilson(k / n, n)
    assert found == pytest.approx((wanted.low, wanted.high), abs=1e-12)
    assert json.dumps(found)
