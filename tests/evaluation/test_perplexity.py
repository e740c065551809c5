"""Perplexity against the definition in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_tiny
from scipy import stats
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, NonFiniteError, perplexity
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.evaluation import Perplexity
from lyapunov_prune.evaluation.score import score
from lyapunov_prune.forward import scoring
from lyapunov_prune.models.structure import find_structure


def test_agrees_with_the_definition_in_float64(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    found = perplexity(model, ids)
    with torch.no_grad():
        logits = model.double()(ids).logits[:, :-1].double()
    losses = -logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert found.value == pytest.approx(float(losses.mean().exp()), rel=1e-5)
    np.testing.assert_allclose(found.windows, losses.squeeze(-1).mean(-1), rtol=1e-5)
    assert found.scored == losses.numel()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_block_of_positions_after_the_other_gives_the_same(
    family: str, batch_size: int, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny(family)
    wanted, right = (
        perplexity(model, ids, batch_size=batch_size),
        score(model, TokenBatch(ids, "text", "all", None), batch_size=batch_size),
    )
    monkeypatch.setattr(scoring, "_WHOLE", 0)
    monkeypatch.setattr(scoring, "_ENTRIES", 9 * 97)
    rows = list[int]()
    model.get_output_embeddings().register_forward_hook(lambda m, x, z: rows.append(z[..., 0].numel()))
    found = perplexity(model, ids, batch_size=batch_size)
    assert max(rows) <= 9
    np.testing.assert_allclose(found.windows, wanted.windows, rtol=1e-6)
    again = score(model, TokenBatch(ids, "text", "all", None), batch_size=batch_size)
    assert max(rows) <= 9
    np.testing.assert_allclose(again.losses, right.losses, rtol=1e-6)
    np.testing.assert_array_equal(again.correct, right.correct)


def test_a_model_that_knows_nothing_scores_its_vocabulary(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = perplexity(model, ids.repeat(2, 1))
    assert found.value == pytest.approx(97)
    assert found.interval == pytest.approx((97, 97))


def test_windows_are_scored_on_their_own(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    together, alone = perplexity(llama, ids, batch_size=3), [perplexity(llama, row[None]).nll for row in ids]
    np.testing.assert_allclose(together.windows, alone, rtol=1e-5)
    assert together.nll == pytest.approx(np.mean(alone), rel=1e-5)


def test_the_ratio_is_paired_by_window(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = perplexity(llama, ids.repeat(2, 1))
    assert found.ratio_to(found) == (1, 1, 1)
    few = perplexity(llama, ids[:3])
    assert np.isnan([few.interval, few.ratio_to(few)[1:]]).all()
    assert "no interval" in few.answer()[0]
    assert "cannot tell" in few.against(few)


def test_the_intervals_are_students_over_four_blocks_of_windows(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    first = replace(perplexity(llama, ids), windows=np.array([1.0, 1.5, 3.5, 3.0, 2.0, 1.0, 2.5, 0.5]))
    second = replace(first, windows=np.array([1.25, 2.0, 3.75, 3.0, 2.5, 1.5, 2.0, 0.75]))
    one, other = (each.windows.reshape(4, 2).mean(1) for each in (first, second))
    alone = stats.ttest_1samp(other, 0).confidence_interval()
    assert second.interval == pytest.approx((np.exp(alone.low), np.exp(alone.high)))
    paired = stats.ttest_rel(other, one).confidence_interval()
    assert second.ratio_to(first)[1:] == pytest.approx((np.exp(paired.low), np.exp(paired.high)))


@pytest.mark.parametrize("whole", [2**25, 0])
def test_a_loss_that_is_not_finite_is_refused(whole: int, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_WHOLE", whole)
    model = make_tiny("llama")
    with torch.no_grad():
        find_structure(model).layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="output of layer 2 "):
        perplexity(model, ids)
    model = make_tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("inf"))
    with pytest.raises(LyapunovPruneError, match="window 0 of token ids"):
        perplexity(model, ids)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(1, 200, dtype=torch.long), "model's 128"),
        (torch.full((1, 8), 97), "vocabulary"),
        (torch.full((1, 8), -1), "vocabulary"),
        (torch.zeros(8, dtype=torch.long), "integer tensor"),
        (torch.zeros(1, 1, dtype=torch.long), "two tokens"),
        (torch.zeros(1, 8), "integer tensor"),
    ],
)
def test_bad_ids_are_refused(llama: PreTrainedModel, bad: torch.Tensor, message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        perplexity(llama, bad)


def test_saves_and_loads(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    found = perplexity(llama, ids)
    assert str(Perplexity.load(found.save(tmp_path / "p.json"))) == str(found)
