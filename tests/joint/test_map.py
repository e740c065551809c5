"""The map: its leave-two-out error is that of naive refits, no degree is tried that two points can break, and more."""

from __future__ import annotations

import importlib
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.joint import JointMap, fit_map
from lyapunov_prune.joint import map as module
from lyapunov_prune.joint.map import DEGREES, design, left_out_errors, terms

# Shares kept and accuracy, from the authors' page.
PUBLISHED = np.array(importlib.import_module("experiments.5_joint.joint_map.run").PUBLISHED)


def published() -> JointMap:
    return fit_map(1 - PUBLISHED[:, :2], PUBLISHED[:, 2])


def naive(removed: np.ndarray, degree: int) -> np.ndarray:
    """The design, written out."""
    a, g = removed.T
    columns = [a**i * g**j for i in range(degree + 1) for j in range(degree + 1) if i + j <= degree]
    return np.stack(columns, axis=1)


def refits(removed: np.ndarray, scores: np.ndarray, degree: int, leave: int = 2) -> np.ndarray:
    """Score less prediction of the points left out, refitted from nothing each time by numpy's least squares."""
    X, errors = naive(removed, degree), []
    for out in combinations(range(len(scores)), leave):
        rest = np.setdiff1d(np.arange(len(scores)), out)
        theta = np.linalg.lstsq(X[rest], scores[rest], rcond=None)[0]
        errors.append(scores[list(out)] - X[list(out)] @ theta)
    return np.array(errors)


def rank_kept(removed: np.ndarray, degree: int) -> bool:
    """Whether numpy gives the design full rank without any two points."""
    X, count = naive(removed, degree), len(terms(degree))
    rests = (np.delete(X, out, axis=0) for out in combinations(range(len(X)), 2))
    return all(np.linalg.matrix_rank(rest) == count for rest in rests)


def grid(seed: int, points: int, layers: int = 12) -> np.ndarray:
    """Different pairs of counts, as shares."""
    every = np.argwhere(np.ones((layers + 1, layers + 1), bool))
    return np.random.default_rng(seed).permutation(every)[:points] / layers


@pytest.mark.parametrize("degree", DEGREES)
def test_leave_two_out_is_that_of_naive_refits(degree: int) -> None:
    removed, scores = grid(degree, 24), np.random.default_rng(0).normal(80, 5, 24)
    found = left_out_errors(removed, scores, degree)
    np.testing.assert_allclose(found, refits(removed, scores, degree), rtol=1e-7, atol=1e-9)
    rmse = np.sqrt(np.square(refits(removed, scores, degree)).mean())
    assert fit_map(removed, scores).errors[degree] == pytest.approx(rmse, rel=1e-9)


def test_planted_fault_leave_one_out_is_another_number() -> None:
    removed, scores = 1 - PUBLISHED[:, :2], PUBLISHED[:, 2]
    one = np.sqrt(np.square(refits(removed, scores, 2, leave=1)).mean())
    two = np.sqrt(np.square(refits(removed, scores, 2, leave=2)).mean())
    assert published().error == pytest.approx(two, rel=1e-9)
    assert abs(one - two) > 0.005


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), points=st.integers(5, 20), layers=st.sampled_from([3, 4, 12]), line=st.booleans())
def test_a_degree_is_excluded_exactly_where_some_two_points_carry_its_rank(
    seed: int, points: int, layers: int, line: bool
) -> None:
    removed = grid(seed, min(points, (layers + 1) ** 2), layers)
    if line:
        removed[: len(removed) // 2, 1] = 0
    wanted = {degree: rank_kept(removed, degree) for degree in DEGREES}
    assume(any(wanted.values()))
    fitted = fit_map(removed, np.arange(len(removed), dtype=float))
    assert {degree: degree in fitted.errors for degree in DEGREES} == wanted
    assert fitted.errors.keys() ^ fitted.excluded.keys() == set(DEGREES)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), points=st.integers(0, 16), degree=st.sampled_from(DEGREES), line=st.booleans())
def test_with_the_points_that_it_names_a_degree_is_no_longer_excluded(
    seed: int, points: int, degree: int, line: bool
) -> None:
    removed = grid(seed, points)
    if line:
        removed[:, 1] = 0
    more = module._needed(removed, degree)
    assert rank_kept(np.concatenate([removed, more]), degree)
    assert len(np.unique(more, axis=0)) == len(more)
    assert bool(len(more)) != (points >= len(terms(degree)) + 2 and rank_kept(removed, degree))


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), degree=st.sampled_from(DEGREES))
def test_a_polynomial_of_its_degree_is_recovered_exactly(seed: int, degree: int) -> None:
    rng, removed = np.random.default_rng(seed), grid(seed, 24)
    theta = rng.normal(size=len(terms(degree)))
    theta[terms(degree).index((degree, 0))] = 1.0
    fitted = fit_map(removed, design(removed, degree) @ theta)
    assert fitted.degree == degree
    np.testing.assert_allclose(fitted.coefficients, theta, atol=1e-8)
    elsewhere = rng.uniform(size=(5, 2))
    wanted = sum(
        t * elsewhere[:, 0] ** i * elsewhere[:, 1] ** j for t, (i, j) in zip(theta, terms(degree), strict=True)
    )
    np.testing.assert_allclose(fitted.predict(elsewhere), wanted, atol=1e-8)


def test_the_published_points_give_these_numbers() -> None:
    fitted = published()
    assert len(fitted.scores) == 22
    assert fitted.degree == 2
    assert round(fitted.error, 3) == 0.618
    assert fitted.excluded.keys() == {3, 4}
    assert "without (0.08, 0.17) and (0.17, 0.25) the rest determine 9 of 10 coefficients" in fitted.excluded[3]
    line = np.array([(n, 8 - n) for n in range(9)]) / 12
    chosen = line[fitted.predict(line).argmax()]
    assert (1 - chosen).tolist() == [10 / 12, 6 / 12]


def test_planted_fault_a_degree_of_poor_rank_would_win_if_it_were_solved_anyway() -> None:
    """Left in, degree 3 promises more than the dense model has, half of all removed."""
    removed, scores = 1 - PUBLISHED[:, :2], PUBLISHED[:, 2]
    assert np.linalg.matrix_rank(naive(removed, 3)) == 10  # all points together determine it, so no error would come
    theta = np.linalg.lstsq(naive(removed, 3), scores, rcond=None)[0]
    line = np.array([(n, 8 - n) for n in range(9)]) / 12
    assert (naive(line, 3) @ theta).max() > published().predict(line).max() + 4
    assert not rank_kept(removed, 3)
    assert 3 not in published().errors


def test_the_interval_is_that_of_a_regression_from_the_book() -> None:
    """Draper and Smith: `ŷ ± t_{n−p} s √(1 + xᵀ(XᵀX)⁻¹x)`, with the normal equations solved as they stand."""
    fitted, at = published(), np.array([[0.25, 0.5], [0.0, 0.0]])
    X, x = naive(fitted.removed, 2), naive(at, 2)
    theta = np.linalg.solve(X.T @ X, X.T @ fitted.scores)
    s = np.sqrt(np.square(fitted.scores - X @ theta).sum() / 16)
    h = np.einsum("ij,jk,ik->i", x, np.linalg.inv(X.T @ X), x)
    low, high = fitted.interval(at)
    np.testing.assert_allclose(low, x @ theta - stats.t.ppf(0.975, 16) * s * np.sqrt(1 + h), rtol=1e-9)
    np.testing.assert_allclose(high, x @ theta + stats.t.ppf(0.975, 16) * s * np.sqrt(1 + h), rtol=1e-9)


def test_the_interval_covers_what_it_says() -> None:
    rng, removed, at = np.random.default_rng(0), grid(1, 24), np.array([0.4, 0.6])
    truth = np.array([80.0, -5.0, -9.0, -20.0, 4.0, -6.0])
    inside = 0
    for _ in range(400):
        fitted = fit_map(removed, design(removed, 2) @ truth + rng.normal(size=24))
        low, high = fitted.interval(at)
        inside += low <= design(at, 2) @ truth + rng.normal() <= high
    assert 0.90 < inside / 400 < 0.98


def test_a_map_is_read_back_as_it_was(tmp_path: Path) -> None:
    fitted = published()
    again = JointMap.load(fitted.save(tmp_path / "map.json"))
    assert str(again) == str(fitted)
    assert (again.errors, again.excluded) == (fitted.errors, fitted.excluded)
    np.testing.assert_array_equal(again.interval(fitted.removed), fitted.interval(fitted.removed))
    assert "Map of degree 2 through 22 points" in fitted.headline()
    assert "leave-two-out RMSE: degree 1 2.02, degree 2 0.618; degree 3 excluded: without" in fitted.headline()


@pytest.mark.parametrize(
    ("old", "new"), [('"degree": 2', '"degree": 3'), ('"degree": 2', '"degree": 1'), ("64.84", '"NaN"')]
)
def test_a_file_that_does_not_hang_together_is_refused(old: str, new: str, tmp_path: Path) -> None:
    path = published().save(tmp_path / "map.json")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(LyapunovPruneError, match="again"):
        JointMap.load(path)


LINE = [(i / 8, 0.0) for i in range(8)]


@pytest.mark.parametrize(
    ("removed", "scores", "told"),
    [
        ([], [], "need 5 points, not 0"),
        (LINE[:4], [1.0] * 4, "need 5 points, not 4"),
        (LINE, [1.0] * 8, "all 8 points determine 2 of 3"),
        ([*LINE, (0.5, 0.5)], [1.0] * 9, "first of 8 such pairs"),
        (LINE, [1.0], "8 points and 1 scores"),
        ([(0.1, 0.2, 0.3)], [1.0], "pair of shares"),
        ([*LINE, (3, 2)], [1.0] * 9, "3 at place 16"),
        (LINE, [1.0] * 7 + [np.nan], "nan at place 7"),
        (LINE, [1.0] * 7 + [-np.inf], "is not finite"),
    ],
)
def test_bad_points_get_one_line_with_the_remedy(
    removed: list[tuple[float, ...]], scores: list[float], told: str
) -> None:
    with pytest.raises(LyapunovPruneError, match=told) as error:
        fit_map(removed, scores)
    assert "\n" not in str(error.value)
