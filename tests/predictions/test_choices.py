"""Multiple choice against log-likelihoods in float64, of one choice at a time."""

from __future__ import annotations

import copy
import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ITEMS, by_definition, hooks_of, logits_of, make_tiny, make_tokenizer, turned
from scipy.special import rel_entr, softmax
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import LyapunovPruneError, NonFiniteError, remove_layers
from lyapunov_prune.data import ChoiceItem
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.predictions import ChoiceComparison, compare_choices


@pytest.fixture(scope="module")
def pruned(reader: PreTrainedModel) -> PreTrainedModel:
    return remove_layers(reader, [2])


def alike(model: PreTrainedModel, size: float) -> PreTrainedModel:
    """A copy whose last layer adds `size` times as much less."""
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[5].mlp.down_proj.weight.mul_(1 - size)
    return other


def shared(item: ChoiceItem, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """The context, and the first token of every choice."""
    joint = "" if item.query.endswith("\n") else " "
    rows = [tokenizer(item.query + joint + choice)["input_ids"] for choice in item.choices]
    end = next(
        t for t in range(99) if len({row[t] for row in rows}) > 1 or t == len(tokenizer(item.query)["input_ids"])
    )
    return rows[0][:end], [row[end] for row in rows]


@pytest.mark.parametrize("bos", [False, True])
def test_log_likelihoods_and_masses_are_the_definitions(
    bos: bool, reader: PreTrainedModel, pruned: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "split", lambda self, *of: zip(*(each.split(5) for each in of), strict=True))
    tokenizer = make_tokenizer(adds_bos=bos)
    found = compare_choices(reader, pruned, ITEMS, tokenizer)
    for i, item in enumerate(ITEMS):
        context, firsts = shared(item, tokenizer)
        tops = []
        for model, scores, mass in (
            (reader, found.dense, found.dense_mass),
            (pruned, found.compressed, found.compressed_mass),
        ):
            np.testing.assert_allclose(scores[i], by_definition(model, tokenizer, item), rtol=1e-5)
            z = logits_of(model, context)[-1]
            assert mass[i] == pytest.approx(softmax(z)[sorted(set(firsts))].sum(), rel=1e-4)
            tops.append(z.argmax())
        assert found.same_top[i] == (tops[0] == tops[1])
        z, z2 = (logits_of(model, context)[-1] for model in (reader, pruned))
        assert found.kl[i] == pytest.approx(rel_entr(softmax(z), softmax(z2)).sum(), rel=1e-3)
        among = sorted(set(firsts))
        a, b, p, q = z[among], z2[among], softmax(z[among]), softmax(z2[among])
        expected = [turned(a, b), turned(p, q), rel_entr(p, q).sum()] if len(among) > 1 else [np.nan] * 3
        measured = [found.options_logit[i], found.options_probability[i], found.options_kl[i]]
        np.testing.assert_allclose(measured, expected, rtol=1e-3, atol=1e-9)
    assert found.measured_on.bos is bos
    assert found.compressed_model.num_layers == 5
    assert hooks_of(reader) == hooks_of(pruned) == 0


def test_what_is_chosen_and_how_often_it_is_right() -> None:
    nan = np.full(3, np.nan)
    given: Any = {
        "dense": ((-4.0, -3.0), (-1.0, -8.0), (-2.0, -2.0)),
        "compressed": ((-3.0, -4.0), (-1.0, -2.0), (-9.0, -2.0)),
        "characters": ((8.0, 2.0), (1.0, 9.0), (1.0, 1.0)),
        "gold": (1, 0, 1),
        **dict.fromkeys(
            (
                *("dense_mass", "compressed_mass", "same_top", "options_logit", "options_probability", "options_kl"),
                *("kl", "radius", "radius_of_norms", "moved", "changed"),
            ),
            nan,
        ),
    }
    found = ChoiceComparison(**given, compressed_model=None, measured_on=None)  # type: ignore[arg-type]
    assert found.chosen("dense").tolist() == [1, 0, 0]  # of equals the first
    assert found.chosen("compressed").tolist() == [0, 0, 1]
    assert found.chosen("dense", per_character=True).tolist() == [0, 1, 0]
    assert found.accuracy("dense") == pytest.approx(2 / 3)
    assert found.accuracy("dense", per_character=True) == 0
    assert found.accuracy("compressed") == pytest.approx(2 / 3)
    assert found.survival() == pytest.approx(1 / 3)
    assert found.survival(per_character=True) == pytest.approx(2 / 3)
    assert found.favourite("dense") == (0, pytest.approx(2 / 3))
    for per_character in (False, True):
        rows = zip(found.dense, found.compressed, found.characters, strict=True)
        scaled = [(np.array(a), np.array(b), np.array(n) if per_character else 1) for a, b, n in rows]
        pairs = [(softmax(a / n), softmax(b / n)) for a, b, n in scaled]
        expected = [rel_entr(p, q).sum() for p, q in pairs]
        np.testing.assert_allclose(found.text_kl(per_character=per_character), expected, rtol=1e-12)
    assert found.summary()["error"].tolist() == pytest.approx([math.sqrt(2 / 3 * 1 / 3 / 2)] * 2)


def test_a_model_agrees_with_itself(reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    found = compare_choices(reader, reader, ITEMS, tokenizer)
    assert found.dense == found.compressed
    assert found.survival() == found.same_top.mean() == 1
    assert found.certified.tolist() == [False, True, False, False]  # the others begin with a space, one token here
    assert found.violations == ()


@pytest.mark.parametrize("size", [1e-4, 0.1, 1.0])
def test_no_certified_item_changes_and_the_radius_is_that_of_the_theorem(
    size: float, reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    letters = [ChoiceItem(f"{q} {i}\n", tuple("fghijk"[i % 3 :]), 0) for i, q in enumerate(["x", "thy", "é"] * 2)]
    other = alike(reader, size)
    found = compare_choices(reader, other, letters, tokenizer)
    W: Any = reader.lm_head.weight.detach().double().numpy()  # type: ignore[union-attr]
    for i, item in enumerate(letters):
        context, firsts = shared(item, tokenizer)
        z, z2 = logits_of(reader, context)[-1][firsts], logits_of(other, context)[-1][firsts]
        best, norms, rows = int(z.argmax()), np.linalg.norm(W[firsts], axis=-1), W[firsts]
        others = [j for j in range(len(firsts)) if j != best]
        lead = [(z[best] - z[j]) / (norms[best] + norms[j]) for j in others]
        assert found.radius_of_norms[i] == pytest.approx(min(lead), rel=1e-3, abs=1e-6)
        apart = [(z[best] - z[j]) / np.linalg.norm(rows[best] - rows[j]) for j in others]
        assert found.radius[i] == pytest.approx(min(apart), rel=1e-3, abs=1e-6)
        assert found.radius[i] > found.radius_of_norms[i]
        assert found.changed[i] == (z2.argmax() != best)
    assert found.violations == ()
    assert found.certified.all() == (size == 1e-4)
    assert found.changed.any() or size < 1.0
    assert ("6 of 6 items (6 by the row norms alone), 0 changed" in found.headline()) == (size == 1e-4)


def test_another_head_is_no_case_of_the_theorem(reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    other: Any = copy.deepcopy(reader)
    with torch.no_grad():
        other.lm_head.weight[5, 5] += 0.1
    capped = make_tiny("gemma2", vocab_size=260, final_logit_softcapping=2.0)
    for first, second in ((reader, other), (capped, capped), (reader, capped)):
        found = compare_choices(first, second, ITEMS[:2], tokenizer)
        assert np.isnan(found.radius).all()
        assert not found.certified.any()
        assert "no proof" in str(found)
    np.testing.assert_allclose(found.compressed[0], by_definition(capped, tokenizer, ITEMS[0]), rtol=1e-5)


def test_a_limit_takes_the_first_items(
    reader: PreTrainedModel, pruned: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    found = compare_choices(reader, pruned, ITEMS, tokenizer, limit=2)
    whole = compare_choices(reader, pruned, ITEMS, tokenizer)
    assert found.dense == whole.dense[:2]
    assert found.gold == (0, 2)
    assert found.measured_on.text == "2 items"
    assert found.measured_on.text_hash != whole.measured_on.text_hash
    longest = "Two and two are\nzzzzzzzzzzzz"
    assert found.measured_on.context == len(longest)
    again = ChoiceComparison.load(found.save(tmp_path / "c.json"))
    assert str(again) == str(found)
    assert again.same_top.dtype == bool
    assert len(found.to_frame()) == 2
    for limit in (0, -1):
        with pytest.raises(LyapunovPruneError, match=f"limit is {limit}"):
            compare_choices(reader, pruned, ITEMS, tokenizer, limit=limit)


def test_what_cannot_be_scored_is_refused(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, llama: PreTrainedModel
) -> None:
    with pytest.raises(LyapunovPruneError, match="vocabulary of 97"):
        compare_choices(reader, llama, ITEMS, tokenizer)
    with pytest.raises(LyapunovPruneError, match="model's 128"):
        compare_choices(reader, reader, [ChoiceItem("q", ("x" * 200, "y"), 0)], tokenizer)
    broken: Any = copy.deepcopy(reader)
    with torch.no_grad():
        broken.model.layers[3].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="output of layer 3"):
        compare_choices(reader, broken, ITEMS, tokenizer)


def test_choices_may_be_letters(reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    candidates = importlib.import_module("experiments.4_hierarchy.candidates.run")
    asked = candidates.lettered(ITEMS[0])
    assert asked.query == "Which melts?\nA. ice\nB. stone\nC. the thick ether\nAnswer:"
    assert (asked.choices, asked.gold) == (("A", "B", "C"), 0)
    found = compare_choices(reader, reader, [asked], tokenizer)
    assert found.favourite("dense")[1] == 1.0
    assert "the dense model takes choice" in found.headline()
