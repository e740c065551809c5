"""Experiments on recovery: paired by item, half of the drop from the right side, a bias that varies or does not."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import digits, make_classifier, make_tiny
from scipy import stats

from experiments.taught import Taught, numbers
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.examples import slices
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.decoder import wrap_any

ASYMMETRY = importlib.import_module("experiments.4_hierarchy.asymmetry.run")
BIAS = importlib.import_module("experiments.5_joint.constant_bias.run")
MARKS = np.array([0, 1, 2, 4, 8])


def a_subject(kind: str, folder: Path) -> Taught:
    if kind == "images":
        model, data = make_classifier("vit"), slices(digits(60))
        return Taught(Unmerged(wrap_any(model), "identity", lambda: None), data, 4, folder)
    ids = torch.randint(3, 97, (40, 24), generator=torch.Generator().manual_seed(0))
    text = slices(TokenBatch(ids, "drawn", "all", bos=False))
    tiny = make_tiny("llama", num_hidden_layers=6).eval()
    return Taught(Unmerged(wrap_any(tiny), "mean-gate", lambda: uncached_logits(tiny, ids)), text, 2, folder)


def test_half_of_the_drop_is_regained_on_a_line_between_marks() -> None:
    """From 0.2 to a dense 1.0 half is at 0.6; 0.5 after one step and 0.7 after two make it one and a half."""
    half = ASYMMETRY.half_regained
    assert half(np.array(1.0), np.array([0.2, 0.5, 0.7, 0.9, 0.9]), MARKS) == pytest.approx(1.5)
    assert half(np.array(0.9), np.array([0.2, 0.5, 0.5, 0.6, 0.9]), MARKS) == pytest.approx(3.0)
    assert half(np.array(1.0), np.array([0.2, 0.2, 0.2, 0.2, 0.4]), MARKS) == 8  # never
    assert half(np.array(1.0), np.array([0.2, 0.9, 0.9, 0.9, 0.9]), MARKS) == 1  # not below one
    assert half(np.array(1.0), np.array([0.2, 0.7, 0.1, 0.7, 0.9]), MARKS) == 1  # the first time
    together = half(np.ones(2), np.array([[0.2, 0.5, 0.7, 0.9, 0.9], [0.2, 0.2, 0.2, 0.2, 0.2]]), MARKS)
    np.testing.assert_allclose(together, [1.5, 8])


def made_items(
    attention: list[float], activation: list[float], m: int = 400
) -> tuple[np.ndarray, dict[tuple[str, str, int], np.ndarray]]:
    """Items whose difficulty both types share, and scores that follow these means but for small noise."""
    drawn = np.random.default_rng(0)
    hard = drawn.normal(size=m)
    hard -= hard.mean()

    def rows(means: list[float]) -> np.ndarray:
        noise = drawn.normal(size=(len(means), m)) / 20
        return np.array(means)[:, None] + hard + noise - noise.mean(1, keepdims=True)

    curves = {
        ("sgd", kind, n): rows(means)
        for n in (2, 4)
        for kind, means in (("attention", attention), ("activation", activation))
    }
    return 1.0 + hard, curves


def test_types_are_compared_item_by_item() -> None:
    dense, curves = made_items([0.6, 0.6, 0.7, 0.75, 0.85], [0.5, 0.7, 0.8, 0.9, 0.9])
    rows = list(ASYMMETRY.comparisons(dense, curves, MARKS))
    assert [(p.quantity, p.optimizer, p.removed) for p in rows] == [
        *(("drop", "", n) for n in (2, 4, 0)),
        *(("gap", "sgd", n) for n in (2, 4, 0)),
        *(("steps", "sgd", n) for n in (2, 4, 0)),
    ]
    drop, gap, steps = rows[0], rows[3], rows[6]
    assert (drop.attention, drop.activation, drop.between) == pytest.approx((0.4, 0.5, 0.1))
    assert (gap.attention, gap.activation, gap.between) == pytest.approx((0.15, 0.1, -0.05))
    paired = stats.ttest_rel(dense - curves["sgd", "activation", 2][0], dense - curves["sgd", "attention", 2][0])
    np.testing.assert_allclose([drop.low, drop.high], paired.confidence_interval(0.95))
    assert (steps.attention, steps.activation) == pytest.approx((6.0, 1.5), rel=1e-6)
    assert steps.between == pytest.approx(4.0)
    assert steps.low < steps.between < steps.high
    assert steps.high - steps.low < 1  # the difficulty of items, twenty times the noise, is in both and cancels


def test_planted_fault_items_in_another_order_pair_with_none() -> None:
    dense, curves = made_items([0.6, 0.6, 0.7, 0.75, 0.85], [0.5, 0.7, 0.8, 0.9, 0.9])
    shuffled = dict(curves)
    order = np.random.default_rng(1).permutation(len(dense))
    shuffled["sgd", "activation", 2] = curves["sgd", "activation", 2][:, order]
    sound, faulty = (next(ASYMMETRY.comparisons(dense, c, MARKS)) for c in (curves, shuffled))
    assert sound.between == pytest.approx(faulty.between)
    assert faulty.high - faulty.low > 10 * (sound.high - sound.low)


def test_a_depth_that_costs_nothing_has_no_half() -> None:
    dense, curves = made_items([1.0, 1.0, 1.0, 1.0, 1.0], [0.5, 0.7, 0.8, 0.9, 0.9])
    assert not [p for p in ASYMMETRY.comparisons(dense, curves, MARKS) if p.quantity == "steps"]


def test_a_depth_at_which_neither_type_regains_half_has_no_quotient() -> None:
    dense, curves = made_items([0.5, 0.5, 0.6, 0.6, 0.6], [0.5, 0.5, 0.6, 0.6, 0.7])
    assert not [p for p in ASYMMETRY.comparisons(dense, curves, MARKS) if p.quantity == "steps"]


def test_a_quotient_of_a_recovery_that_ends_too_soon_is_a_bound() -> None:
    found = ASYMMETRY.Asymmetry.load(ASYMMETRY.HERE / ASYMMETRY.FILE)
    assert "at least 6.29" in ASYMMETRY.by_steps(found)

    def slower(p: Any) -> Any:
        return replace(p, attention=min(p.attention, 20.0), low=3.0, high=5.0) if p.quantity == "steps" else p

    assert "at least" not in ASYMMETRY.by_steps(replace(found, paired=tuple(map(slower, found.paired))))
    few = ASYMMETRY.Asymmetry.load(ASYMMETRY.HERE / "smollm2-135m" / ASYMMETRY.FILE)
    assert "| AdamW | 2 | 6 or more | 6 or more | — | — |" in ASYMMETRY.by_steps(few)


def test_the_interval_over_seeds_pools_what_is_within_depths() -> None:
    d = np.random.default_rng(0).normal(size=(6, 2)) + np.arange(6)[:, None]
    residual = d - d.mean(1, keepdims=True)
    error = np.sqrt((residual**2).sum() / 6 / 12)
    np.testing.assert_allclose(ASYMMETRY.pooled(d), d.mean() + error * stats.t.ppf([0.5, 0.025, 0.975], 6), rtol=1e-12)


@pytest.mark.parametrize("kind", ["images", "text"])
def test_both_types_are_recovered_alike_and_never_twice(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = a_subject(kind, tmp_path)
    weights = [p.clone() for p in given.model.parameters()]
    rates = {"adamw": (1e-3, 1e-2), "sgd": (0.1,)}
    found = ASYMMETRY.measure(given, (1, 3), 3, 2, rates)
    assert all(torch.equal(p, q) for p, q in zip(given.model.parameters(), weights, strict=True))
    assert found.marks.tolist() == [0, 1, 2, 3]
    assert len(found.curves) == 2 * 2 * 2 * 2
    tried = {(c.optimizer, c.rate): [] for c in (*found.curves, *found.probes)}
    for c in (*found.curves, *found.probes):
        if (c.removed, c.seed) == (3, 0):
            tried[c.optimizer, c.rate].append(c.scores[-1])
    ends = {rate: np.mean(v) for (name, rate), v in tried.items() if name == "adamw"}
    assert found.chosen == {"adamw": max(ends, key=ends.get), "sgd": 0.1}
    drop = {p.removed: p for p in found.of("drop")}
    for kind_, n in (("attention", 1), ("activation", 3)):
        ones = [c for c in found.curves if (c.kind, c.removed) == (kind_, n)]
        assert len({c.scores[0] for c in ones}) == 1
        assert getattr(drop[n], kind_) == pytest.approx(found.dense - ones[0].scores[0])
        ends_ = np.mean([c.scores[-1] for c in ones if c.optimizer == "sgd"])
        gap = next(p for p in found.of("gap", "sgd") if p.removed == n)
        assert getattr(gap, kind_) == pytest.approx(found.dense - ends_)
    found.save(tmp_path / ASYMMETRY.FILE)
    assert set(ASYMMETRY.written(tmp_path)) == {"setting", "drop", "steps", "regained"}
    assert ASYMMETRY.figure(found).startswith("<svg")
    monkeypatch.setattr(ASYMMETRY, "recover", lambda *_, **__: pytest.fail("recovered again"))
    assert ASYMMETRY.measure(a_subject(kind, tmp_path), (1, 3), 3, 2, rates).to_json() == found.to_json()


def drawn_bias(spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Differences (P, S) with recovery noise of one, and no noise of items."""
    drawn = np.random.default_rng(3)
    return drawn.normal(size=(5, 4)) + spread * np.arange(5)[:, None], np.zeros((5, 5))


def test_a_bias_varies_by_the_analysis_of_variance() -> None:
    for spread in (0.0, 2.0):
        d, none = drawn_bias(spread)
        np.testing.assert_allclose(BIAS.varies(d, none), stats.f_oneway(*d), rtol=1e-10)
    assert BIAS.varies(*drawn_bias(2.0))[1] < 1e-3
    d, none = drawn_bias(0.0)
    shared = BIAS.varies(d, none + 100.0)  # what all pairs' items have in common moves no difference
    np.testing.assert_allclose(shared, BIAS.varies(d, none), rtol=1e-6)


def test_an_interval_of_the_bias_holds_items_and_seeds() -> None:
    d, none = drawn_bias(1.0)
    low, high = BIAS.intervals(d, none + 1e-12 * np.eye(5), 100)
    error = np.sqrt(d.var(1, ddof=1).mean() / 4)
    np.testing.assert_allclose(high - d.mean(1), stats.t.ppf(0.975, 15) * error, rtol=1e-6)
    wide = BIAS.intervals(d, 25 * np.eye(5), 100)
    assert (wide[1] - wide[0] > 3 * (high - low)).all()


@pytest.mark.parametrize("kind", ["images", "text"])
def test_five_points_are_recovered_longer_from_the_same_start(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = a_subject(kind, tmp_path)
    found = BIAS.measure(given, 4, 1, 2)
    assert found.pairs.tolist() == [[4, 0], [0, 4], [3, 1], [1, 3], [0, 2]]
    points = found.points
    for i, pair in enumerate(found.pairs.tolist()):
        for seed in (0, 1):
            place = (points.pairs == pair).all(1) & (points.seeds == seed)
            assert place.sum() == 1
            assert found.fast[i, seed] == pytest.approx(points.scores[place][0])
    moved = found.after.scores - found.before.scores
    X = np.column_stack([np.ones(5), found.pairs / given.layers])
    Y = np.column_stack([np.ones(len(moved)), found.before.removed])
    np.testing.assert_allclose(moved, Y @ np.linalg.solve(X.T @ X, X.T @ found.bias), atol=1e-9)
    found.save(tmp_path / BIAS.FILE)
    assert set(BIAS.written(tmp_path)) == {"setting", "bias", "optima", "varies", "trend"}
    assert BIAS.figure(found).startswith("<svg")
    assert not list(tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(BIAS, "recover", lambda *_, **__: pytest.fail("recovered again"))
    monkeypatch.setattr("lyapunov_prune.joint.points.recover", lambda *_, **__: pytest.fail("recovered again"))
    again = BIAS.measure(a_subject(kind, tmp_path), 4, 1, 2)
    np.testing.assert_array_equal(again.long, found.long)


def test_the_numbers_on_the_bias_follow_the_scores(tmp_path: Path) -> None:
    bias = BIAS.measure(a_subject("images", tmp_path), 4, 1, 2)
    noise = np.array([-0.001, 0.001])
    quiet = replace(bias, fast=np.zeros((5, 2)), long=0.01 + np.tile(noise, (5, 1)), covariance=np.eye(5) * 1e-8)
    assert BIAS.numbers(quiet)["varies"].endswith("p = 1")
    steep = replace(quiet, long=np.array([0.5, 0.1, 0.4, 0.2, 0.1])[:, None] + noise)
    varies, trend = (BIAS.numbers(steep)[name] for name in ("varies", "trend"))
    assert float(varies.rpartition(" ")[2]) < 0.05
    assert trend.startswith("0.4 ± ")


@pytest.mark.parametrize("words", ["", "a", "1,-2", "1 2"])
def test_a_list_of_an_option_is_refused_in_a_line(words: str) -> None:
    with pytest.raises(LyapunovPruneError, match="depths"):
        numbers(words, "--depths")
    assert numbers("1,2e-4", "--x") == [1, 2e-4]
