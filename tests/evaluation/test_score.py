"""Scores of items against the definition in float64."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import digits, make_classifier, make_tiny
from scipy import stats
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, NonFiniteError, TokenBatch, perplexity
from lyapunov_prune.evaluation import paired_error, score
from lyapunov_prune.models.structure import find_structure


def text(ids: torch.Tensor) -> TokenBatch:
    return TokenBatch(ids, "text", "all", None)


def test_a_text_is_scored_as_defined_in_float64(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    found = score(model, text(ids))
    with torch.no_grad():
        logits = model.double()(ids).logits[:, :-1].double()
    losses = -logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    np.testing.assert_allclose(found.losses, losses.mean(-1), rtol=1e-5)
    np.testing.assert_array_equal(found.correct, (logits.argmax(-1) == ids[:, 1:]).double().mean(-1))
    assert found.value == -found.loss == pytest.approx(-float(losses.mean()), rel=1e-5)
    assert found.accuracy == found.correct.mean()
    assert not found.images


def test_a_text_has_the_loss_of_its_perplexity(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    np.testing.assert_array_equal(score(llama, text(ids)).losses, perplexity(llama, ids).windows)


def test_the_next_token_is_counted_where_it_is_the_most_likely(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    with torch.no_grad():
        likely = llama(ids).logits.argmax(-1)
    followed = ids.clone()
    followed[:, -1] = likely[:, -2]  # nothing before the last token sees it
    before, after = score(llama, text(ids)), score(llama, text(followed))
    hit = (ids[:, -1] == likely[:, -2]).numpy()
    np.testing.assert_allclose(after.correct - before.correct, (~hit) / 39)


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_images_are_scored_as_defined_in_float64(name: str) -> None:
    model, images = make_classifier(name), digits(12)
    found = score(model, images, batch_size=5)
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(images.pixels.double()).logits
    losses = -logits.log_softmax(-1)[torch.arange(12), images.labels]
    np.testing.assert_allclose(found.losses, losses, rtol=1e-4)
    np.testing.assert_array_equal(found.correct, (logits.argmax(-1) == images.labels).double())
    assert found.images
    assert found.value == found.accuracy == found.correct.mean()
    assert found.losses.dtype == found.correct.dtype == np.float64
    assert found.measured_on == images.measured_on(model)


def test_a_classifier_in_training_mode_is_scored_without_dropout() -> None:
    model = make_classifier("vit")
    model.config.hidden_dropout_prob = 0.5
    model = type(model)(model.config)
    images = digits(4)
    assert np.array_equal(score(model.train(), images).losses, score(model.eval(), images).losses)


def test_items_come_one_after_another_whatever_the_batch() -> None:
    model, images = make_classifier("deit"), digits(7)
    np.testing.assert_allclose(score(model, images, batch_size=3).losses, score(model, images).losses, rtol=1e-5)


def test_the_logits_of_one_batch_are_gone_before_the_next(monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    forward, seen, alive = model.forward, [], []

    def watched(*args: Any, **kwargs: Any) -> Any:
        alive.append(sum(logits() is not None for logits in seen))
        output = forward(*args, **kwargs)
        seen.append(weakref.ref(output.logits))
        return output

    monkeypatch.setattr(model, "forward", watched)
    score(model, text(ids))
    assert alive == [0, 0, 0]


def test_the_summary_names_loss_and_accuracy(ids: torch.Tensor) -> None:
    found = replace(score(make_tiny("llama"), text(ids)), losses=np.array([1.0, 2.0, 6.0]), correct=np.zeros(3))
    row = found.summary().iloc[0]
    assert (row["score"], row["loss"], row["accuracy"]) == (-3.0, 3.0, 0.0)


def test_the_error_is_paired_by_item(ids: torch.Tensor) -> None:
    a, b = (score(make_tiny("llama", seed), text(ids)) for seed in (0, 1))
    assert paired_error(a, b) == pytest.approx(stats.sem(b.losses - a.losses))
    assert paired_error(a, a) == 0
    images = digits(30)
    dense, other = score(make_classifier("vit"), images), score(make_classifier("deit"), images)
    assert paired_error(dense, other) == pytest.approx(stats.sem(dense.correct - other.correct))


def test_scores_of_other_items_do_not_pair() -> None:
    model, images = make_classifier("vit"), digits()
    with pytest.raises(LyapunovPruneError, match="same two items"):
        paired_error(score(model, images), replace(score(model, images.take([1, 0])), measured_on=_learn(images)))
    one = score(model, images.take([0]))
    with pytest.raises(LyapunovPruneError, match="two items"):
        paired_error(one, one)


def _learn(images: Any) -> Any:
    return replace(images.take([1, 0]), split="learn").measured_on(make_classifier("vit"))


def test_a_loss_that_is_not_finite_is_refused(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    with torch.no_grad():
        find_structure(model).layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="output of layer 2 "):
        score(model, text(ids))
    classifier = make_classifier("vit")
    with torch.no_grad():
        classifier.classifier.weight[0, 0] = float("inf")
    with pytest.raises(LyapunovPruneError, match="losses of images of digits"):
        score(classifier, digits())


def test_no_items_a_forward_are_refused() -> None:
    with pytest.raises(LyapunovPruneError, match="batch_size is 0"):
        score(make_classifier("vit"), digits(), batch_size=0)
