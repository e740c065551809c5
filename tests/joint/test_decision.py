"""The decision: every pair of the budget and no other, the largest by the map, and noise that is not hidden."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lyapunov_prune.bounds.choice import regret_of_argmax_le
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.joint import JointDecision, JointMap, decide, fit_map
from lyapunov_prune.joint import decision as module
from lyapunov_prune.joint.map import design

LAYERS = 12
PAIRS = np.array([(a, g) for a in range(0, 9, 2) for g in range(0, 9, 2)])


def surface(pairs: np.ndarray) -> np.ndarray:
    """A score whose best pair of 8 is (3, 5): by hand, it falls by |a − 3| on that line, squared."""
    a, g = np.asarray(pairs, float).T
    return 80 - (a + g) - (a - g + 2) ** 2 / 4


def fitted(noise: float = 0.0, seed: int = 0) -> JointMap:
    moved = np.random.default_rng(seed).normal(0, noise, len(PAIRS))
    return fit_map(PAIRS / LAYERS, surface(PAIRS) + moved)


def test_every_pair_of_a_count_is_there_and_the_largest_is_chosen() -> None:
    decision = decide(fitted(), LAYERS, remove=8, selection_error=0.0)
    assert decision.pairs.tolist() == [[n, 8 - n] for n in range(9)]
    np.testing.assert_allclose(decision.predicted, surface(decision.pairs), atol=1e-9)
    assert decision.chosen == (3, 5)
    assert decision.gap == pytest.approx(1.0)
    assert decision.certain
    assert decision.regret == 0
    assert decision.pairs[decision.within].tolist() == [[3, 5]]


@settings(max_examples=50)
@given(remove=st.integers(1, 24), a=st.integers(0, 12), g=st.integers(0, 12))
def test_the_pairs_of_a_count_are_all_that_can_go(remove: int, a: int, g: int) -> None:
    wanted = [[x, y] for x in range(a + 1) for y in range(g + 1) if x + y == remove]
    if wanted:
        found = decide(fitted(), LAYERS, remove=remove, most=(a, g), selection_error=0.0)
        assert found.pairs.tolist() == wanted
    else:
        with pytest.raises(LyapunovPruneError, match=f"{remove} to remove"):
            decide(fitted(), LAYERS, remove=remove, most=(a, g), selection_error=0.0)


@settings(max_examples=50)
@given(constant=st.floats(-1e4, 1e4), seed=st.integers(0, 10**6))
def test_adding_a_constant_changes_no_choice(constant: float, seed: int) -> None:
    """`argmax_add_const`: what fast finetuning misses alike everywhere decides nothing."""
    one = fitted(0.5, seed)
    other = fit_map(one.removed, one.scores + constant)
    a, b = (decide(m, LAYERS, remove=8, selection_error=0.0) for m in (one, other))
    assert one.degree == other.degree
    np.testing.assert_allclose(b.predicted - constant, a.predicted, atol=1e-7)
    assert a.chosen == b.chosen
    assert (a.within == b.within).all()
    assert (a.gap, a.noise) == pytest.approx((b.gap, b.noise), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"remove": 0}, "0 to remove"),
        ({"remove": 25}, "25 to remove"),
        ({"remove": 24, "most": (11, 12)}, "24 to remove"),
        ({"remove": 2, "most": (13, 12)}, "give 0 to 12 each"),
        ({"remove": 8, "selection_error": 26.0}, "error, 26, .*9 pairs .*25"),
        ({"remove": 8, "selection_error": 99.0}, "error, 99"),
        ({"remove": 8, "selection_error": np.nan}, "selection_error is nan"),
        ({"remove": 8, "repeats": [[1.0]]}, "two seeds or more"),
        ({"remove": 8, "repeats": [[1.0, np.inf]]}, "two seeds or more"),
        ({"layers": 0, "remove": 8}, "layers is 0"),
    ],
)
def test_bad_input_gets_one_line_with_the_remedy(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(LyapunovPruneError, match=told) as error:
        decide(fitted(), **{"layers": LAYERS, "selection_error": 0.0, **arguments})
    assert "\n" not in str(error.value)


def test_a_selection_set_that_cannot_tell_the_best_from_the_next_is_said() -> None:
    quiet = decide(fitted(), LAYERS, remove=8, selection_error=0.5)
    told = decide(fitted(), LAYERS, remove=8, selection_error=2.0)
    assert "selection set" not in quiet.headline()
    assert "error is 2, above the gap" in told.headline()


def test_noise_over_seeds_is_pooled() -> None:
    rows = [[1.0, 2.0, 6.0], [10.0, 14.0]]  # about their means, 3 and 12
    assert module.over_seeds(rows) == (np.sqrt((14 + 8) / 3), 3)
    value, freedom = module.over_seeds([])
    assert np.isnan(value)
    assert freedom == 0


@settings(max_examples=50)
@given(size=st.floats(0.01, 3.0), more=st.floats(1.0, 1.5), pairs=st.integers(1, 40))
def test_noisier_seeds_never_lower_the_noise_bound(size: float, more: float, pairs: int) -> None:
    """σ alone decided once: where seeds with many degrees of freedom overtook the map's few, the bound fell by half."""
    m = fit_map(PAIRS[:8] / LAYERS, surface(PAIRS[:8]) + np.random.default_rng(0).normal(0, 0.3, 8))
    rows = [[[0.0, size * by * m.residual[0]]] * pairs for by in (1.0, more)]
    lower, higher = (decide(m, LAYERS, remove=8, repeats=r, selection_error=0.0).noise for r in rows)
    assert higher >= lower >= decide(m, LAYERS, remove=8, selection_error=0.0).noise


def test_the_noise_bound_is_of_the_larger_deviation() -> None:
    """By hand: `t_{1 − 0.05/18} σ max √h` over the nine pairs of the budget."""
    m = fitted(0.3)
    alone = decide(m, LAYERS, remove=8, selection_error=0.0)
    X, x = design(m.removed, m.degree), design(alone.pairs / LAYERS, m.degree)
    x = x - x.mean(0)
    h = np.einsum("ij,jk,ik->i", x, np.linalg.inv(X.T @ X), x).max()
    freedom = len(PAIRS) - len(m.coefficients)
    assert alone.residual == (m.residual[0], freedom)
    assert alone.noise == pytest.approx(stats.t.ppf(1 - 0.05 / 18, freedom) * m.residual[0] * np.sqrt(h))
    small = decide(m, LAYERS, remove=8, repeats=[[1.0, 1.01]] * 4, selection_error=0.0)
    assert small.noise == alone.noise  # what seeds do not explain is misfit, and counts
    large = decide(m, LAYERS, remove=8, repeats=[[1.0, 9.0]] * 4, selection_error=0.0)
    assert large.noise == pytest.approx(stats.t.ppf(1 - 0.05 / 18, 4) * np.sqrt(32) * np.sqrt(h))
    assert large.over_seeds == (pytest.approx(np.sqrt(32)), 4)


def test_the_noise_bound_holds_as_often_as_it_says_and_so_do_the_theorems() -> None:
    """Maps of noisy scores of a known surface: where the bound holds, the regret is within what the theorem says."""
    held, certain = 0, 0
    for seed in range(300):
        decision = decide(fitted(0.6, seed), LAYERS, remove=8, selection_error=0.0)
        truth = surface(decision.pairs)
        close = bool(np.ptp(decision.predicted - truth) <= 2 * decision.noise)
        held += close
        if close:
            check = regret_of_argmax_le(decision.predicted, decision.noise, truth)
            assert check is not None
            assert check.holds
            assert truth.max() - truth[decision.best] <= decision.regret
            assert decision.within[truth.argmax()]
            certain += decision.certain
    assert held / 300 > 0.93
    assert certain < 300


def test_noise_counts_twice_once_for_each_of_two_pairs() -> None:
    """The worst case by hand: the chosen pair errs upwards by the noise and another downwards."""
    decision = decide(fitted(), LAYERS, remove=8, selection_error=0.0)
    predicted = np.zeros(len(decision.pairs))
    predicted[0], predicted[1:3] = 1.0, (1.0 - 1.9, 1.0 - 2.1)
    worst = replace(decision, predicted=predicted, noise=1.0)
    assert worst.within[:3].tolist() == [True, True, False]
    assert worst.regret == 2.0
    assert not worst.certain


def test_a_decision_is_read_back_as_it_was_and_says_what_it_is(tmp_path: Path) -> None:
    decision = decide(fitted(2.0), LAYERS, remove=8, repeats=[[1.0, 2.0]], selection_error=0.01)
    again = JointDecision.load(decision.save(tmp_path / "decision.json"))
    assert str(again) == str(decision)
    assert (again.chosen, again.noise) == (decision.chosen, decision.noise)
    told = decision.headline()
    assert f"Remove {decision.chosen[0]} attentions and {decision.chosen[1]} activations of 12 layers" in told
    assert "not certain: " in told
    assert "0.707 over seeds (1 degrees of freedom)" in told
    assert decision.to_frame()["within noise"].sum() == decision.within.sum()
    alone = decide(fitted(), LAYERS, remove=24, selection_error=0.0)
    assert (alone.gap, alone.certain, alone.regret) == (np.inf, True, 0)
    assert str(JointDecision.load(alone.save(tmp_path / "alone.json"))) == str(alone)  # without seeds, with no next
    assert "no repeated seeds" in alone.headline()


def test_a_file_that_does_not_hang_together_is_refused(tmp_path: Path) -> None:
    decision = decide(fitted(), LAYERS, remove=8, selection_error=0.0)
    for broken in ({"predicted": decision.predicted[:-1]}, {"pairs": decision.pairs + 5}):
        with pytest.raises(LyapunovPruneError, match="again"):
            replace(decision, **broken)
