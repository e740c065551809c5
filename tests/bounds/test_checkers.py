"""Each checker on numbers that keep its bound, and on numbers that break it; bounds by sampling."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import rand
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.bounds import decision
from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.checkers import (
    composition_bound,
    interpolation_bound,
    lyapunov_contraction_bound,
    preln_contraction_sufficient,
    residual_growth_contraction,
    retrieval_bound,
    sparse_activation_bound,
    trajectory_error_le,
)
from lyapunov_prune.bounds.decision import (
    TokenCertificate,
    _distance,
    argmax_unchanged_of_row_difference,
    argmax_unchanged_of_state_error,
)
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import certified_norm, certify, exact_norm


def norm(x: torch.Tensor) -> np.ndarray:
    return torch.linalg.vector_norm(x, dim=-1).numpy()


def stages(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W, a sparse S and a low-rank L of S."""
    W = rand(24, 40, seed=seed)
    S = torch.where(W.abs() > 0.7, W, 0)
    U, s, V = torch.linalg.svd(S, full_matrices=False)
    return W, S, (U[:, :6] * s[:6]) @ V[:6]


def inputs(A: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Random inputs of every size, and the worst one of `A`."""
    x = rand(200, A.shape[1], seed=seed) * torch.logspace(-8, 8, 200, dtype=torch.float64).unsqueeze(-1)
    return torch.cat([x, 3 * certify(A).direction.unsqueeze(0)])


@pytest.mark.parametrize("seed", range(5))
def test_theorems_1_to_4_hold_on_samples_and_are_nearly_attained(seed: int) -> None:
    W, S, L = stages(seed)
    x = inputs(W - S, seed)
    check = sparse_activation_bound(norm(x @ (W - S).T), norm(x), certified_norm(W - S), matrix="m", layer=3)
    assert check.holds
    assert 0.999 < check.ratio < 1
    assert (check.theorem, check.matrix, check.layer, check.inputs) == ("sparse_activation_bound", "m", 3, 201)
    assert check.bound > check.error

    x = inputs(S - L, seed)
    check = interpolation_bound(norm(x @ (S - L).T), norm(x), certified_norm(S - L))
    assert check.holds
    assert check.ratio > 0.999
    assert certified_norm(S - L) == pytest.approx(float(torch.linalg.svdvals(S)[6]), rel=1e-3, abs=0)

    d = inputs(W, seed)
    check = retrieval_bound(norm(d @ W.T), norm(d), certified_norm(W))
    assert check.holds
    assert check.ratio > 0.999

    x2, d = inputs(W - L, seed), inputs(W, seed + 1)
    error = norm((x2 + d) @ W.T - x2 @ L.T)
    norms = {
        "weight_norm": certified_norm(W),
        "sparse_norm": certified_norm(W - S),
        "low_rank_norm": certified_norm(S - L),
    }
    assert composition_bound(error, norm(x2), norm(d), **norms).holds
    # Each of its three terms is needed: inputs that only this one accounts for break the bound without it.
    d = inputs(W, seed)
    assert not composition_bound(norm(d @ W.T), 0 * norm(d), norm(d), **(norms | {"weight_norm": 0.0})).holds
    for name, E in (("sparse_norm", W - S), ("low_rank_norm", S - L)):
        x = inputs(E, seed)
        alone = {"weight_norm": 0.0, "sparse_norm": 0.0, "low_rank_norm": 0.0, name: norms[name]}
        assert composition_bound(norm(x @ E.T), norm(x), 0 * norm(x), **alone).holds
        assert not composition_bound(norm(x @ E.T), norm(x), 0 * norm(x), **(alone | {name: 0.0})).holds


@pytest.mark.parametrize("seed", range(8))
def test_planted_fault_a_residual_scaled_after_its_norm_was_taken(seed: int) -> None:
    W, S, _ = stages(seed)
    E, bound = W - S, certified_norm(W - S)
    x = inputs(E)
    assert sparse_activation_bound(norm(x @ E.T), norm(x), bound).holds
    assert not sparse_activation_bound(norm(x @ (1.01 * E).T), norm(x), bound).holds


@pytest.mark.parametrize("seed", range(8))
def test_planted_fault_a_norm_estimated_from_below(seed: int) -> None:
    E = rand(300, 300, seed=seed)
    found = certify(E)
    x = torch.linalg.matrix_power(E.T @ E, 2) @ rand(300, seed=seed)  # four steps of power iteration
    rough = float((E @ x).norm() / x.norm())
    assert rough < exact_norm(E)
    error = norm(found.direction @ E.T)
    assert not sparse_activation_bound(error, 1.0, rough).holds
    assert sparse_activation_bound(error, 1.0, found.bound).holds


def test_planted_fault_a_margin_of_the_wrong_size() -> None:
    """The margin is what stands between rounding and an alarm, and no more than that."""
    above = 1 + 1e-6
    assert not sparse_activation_bound(above, 1.0, 1.0).holds
    assert sparse_activation_bound(above, 1.0, 1.0, rounding=1.1e-6).holds
    assert not sparse_activation_bound(above, 1.0, 1.0, rounding=0.9e-6).holds
    check = sparse_activation_bound(1.0, 1.0, 1.0)
    assert 0 < check.margin < 1e-10
    # The worst input is chosen with its own margin, not by its error alone.
    check = sparse_activation_bound([1.0, 0.5], [1.0, 0.4], 1.0, rounding=[0.0, 0.0])
    assert not check.holds
    assert check.error == 0.5
    check = sparse_activation_bound([1.0, 0.5], [1.0, 0.4], 1.0, rounding=[0.0, 0.2])
    assert check.holds


def test_nan_infinity_and_no_inputs_are_no_checks() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(LyapunovPruneError, match="NaN or infinity"):
            sparse_activation_bound([1.0, bad], 1.0, 2.0)
        with pytest.raises(LyapunovPruneError, match="NaN or infinity"):
            retrieval_bound(1.0, 1.0, bad)
    with pytest.raises(LyapunovPruneError, match="no inputs"):
        sparse_activation_bound([], [], 1.0)


def test_a_zero_bound_allows_no_error() -> None:
    assert sparse_activation_bound(0.0, 1.0, 0.0).holds
    assert sparse_activation_bound(0.0, 1.0, 0.0).ratio == 0
    broken = sparse_activation_bound(1e-30, 1.0, 0.0, matrix="m")
    assert not broken.holds
    assert broken.ratio == math.inf
    assert "VIOLATED by m" in str(broken)


def test_checks_add_up_to_the_worse_one() -> None:
    a = BoundCheck("t", "m", 0, error=1.0, bound=2.0, margin=0.0, inputs=5)
    b = BoundCheck("t", "m", 0, error=3.0, bound=2.9, margin=0.0, inputs=7)
    for worst in (a.with_more(b), b.with_more(a)):
        assert (worst.error, worst.inputs, worst.holds) == (3.0, 12, False)
    assert a.with_more(None) is a


def trajectory(layers: int, seed: int, gain: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Errors, growth and local errors of a random dense and compressed residual network."""
    h = rand(50, 16, seed=seed)
    h2 = h + 0.01 * rand(50, 16, seed=seed + 1)
    errors, growth, local = [float((h - h2).norm())], [], []
    for k in range(layers):
        A = gain * rand(16, 16, seed=seed + 10 + k)
        B = torch.where(A.abs() > 0.1, A, 0)

        def f(x: torch.Tensor, M: torch.Tensor = A) -> torch.Tensor:
            return x + torch.tanh(x @ M)

        exact, h2_next = f(h2), f(h2, B)
        growth.append(float((f(h) - exact).norm()) / errors[-1])
        local.append(float((exact - h2_next).norm()))
        h, h2 = f(h), h2_next
        errors.append(float((h - h2).norm()))
    return np.array(errors), np.array(growth), np.array(local)


@pytest.mark.parametrize("seed", range(5))
def test_composition_over_layers(seed: int) -> None:
    errors, growth, local = trajectory(6, seed)
    checks = trajectory_error_le(errors, growth, local)
    assert [c.layer for c in checks] == list(range(6))
    assert all(c.holds and c.estimate for c in checks)
    # The closed form of the composed bound.
    closed = np.prod(growth) * errors[0] + sum(np.prod(growth[k + 1 :]) * local[k] for k in range(6))
    assert checks[-1].bound == pytest.approx(closed, rel=1e-12, abs=0)
    # Theorem 11, written out.
    (K0, K1), (d0, d1) = growth[:2], local[:2]
    assert checks[1].bound == pytest.approx(K1 * K0 * errors[0] + K1 * d0 + d1, rel=1e-12, abs=0)


@pytest.mark.parametrize("seed", range(5))
def test_planted_fault_a_growth_or_local_error_too_small(seed: int) -> None:
    rng = np.random.default_rng(seed)
    K, delta = rng.uniform(0.5, 2, 4), rng.uniform(0.1, 1, 4)
    e = [1.0]
    for k in range(4):  # attained: every layer stretches and adds in the same direction
        e.append(K[k] * e[-1] + delta[k])
    assert all(c.holds for c in trajectory_error_le(e, K, delta))
    for k in range(4):
        smaller = np.where(np.arange(4) == k, 0.99, 1.0)
        for broken in (trajectory_error_le(e, K * smaller, delta), trajectory_error_le(e, K, delta * smaller)):
            assert [c.holds for c in broken[: k + 1]] == [True] * k + [False]
    with pytest.raises(LyapunovPruneError, match="do not fit"):
        trajectory_error_le(e, K[:-1], delta)


NORMAL = st.just(0.0) | st.floats(1e-100, 10)  # below the normal numbers a product loses more than a margin allows


@settings(max_examples=100)
@given(gamma=st.just(0.0) | st.floats(1e-3, 0.99), delta=NORMAL, first=NORMAL, n=st.integers(1, 30))
def test_contraction_bound_is_the_geometric_series(gamma: float, delta: float, first: float, n: int) -> None:
    e = [first]
    for _ in range(n):
        e.append(gamma * e[-1] + delta)
    assert lyapunov_contraction_bound(e, gamma, delta).holds
    if delta > 1e-3:
        assert not lyapunov_contraction_bound([*e[:-1], e[-1] * 1.01], gamma, delta).holds


@pytest.mark.parametrize("gamma", [1.0, 1.5, -0.1, math.nan])
def test_contraction_bound_without_its_hypothesis(gamma: float) -> None:
    with pytest.raises(LyapunovPruneError, match="0 ≤ γ < 1"):
        lyapunov_contraction_bound([1.0, 0.5], gamma, 0.1)


def test_residual_growth_contraction_speaks_only_of_layers_that_meet_its_hypothesis() -> None:
    a, g = np.array([0.5, 2.0, 3.0]), np.array([1.0, 4.0, 2.0])
    V = np.concatenate([[1.0], np.cumprod(a / g)])
    checks = residual_growth_contraction(V, a, g)
    assert [c.layer for c in checks] == [0, 1]
    assert all(c.holds for c in checks)
    V[1] *= 1.01
    assert [c.holds for c in residual_growth_contraction(V, a, g)] == [False, True]


@pytest.mark.parametrize("size", [0.3, 3.0, 30.0])
def test_preln_contraction_by_sampling_vectors(size: float) -> None:
    """State, sublayer output, error and what becomes of it, at random: wherever the condition is met, ρ < 1."""
    h, s, e = rand(400, 16), size * rand(400, 16, seed=1) + 0.5 * size * rand(400, 16), rand(400, 16, seed=2)
    d = rand(400, 16, seed=3) * torch.logspace(-3, 1, 400, dtype=torch.float64).unsqueeze(-1)
    rho = (norm(e + d) / norm(h + s) / (norm(e) / norm(h))) ** 2
    align, gain, kappa = (h * s).sum(-1).numpy() / (norm(h) * norm(s)), norm(s) / norm(h), norm(d) / norm(e)
    met = (1 + kappa) ** 2 < 1 + 2 * align * gain + gain**2
    check = preln_contraction_sufficient(rho, kappa, align, gain)
    assert check is not None
    assert check.inputs == met.sum()
    assert check.holds
    assert check.bound < 1
    assert (rho[met] < 1).all()
    # What the sublayer makes of the error points with it: the bound is attained, and a hundredth less is a violation.
    tight = ((1 + kappa) * norm(e) / norm(h + s) / (norm(e) / norm(h))) ** 2
    attained = preln_contraction_sufficient(tight, kappa, align, gain)
    assert attained is not None
    assert attained.holds
    assert attained.ratio == pytest.approx(1, abs=1e-9)
    broken = preln_contraction_sufficient(1.01 * tight, kappa, align, gain)
    assert broken is not None
    assert not broken.holds


def test_preln_contraction_says_nothing_where_its_condition_is_not_met() -> None:
    assert preln_contraction_sufficient(0.5, 1.0, 0.0, 1.0) is None  # (1 + 1)² against 1 + 0 + 1


def test_larger_budgets_never_lower_the_composed_bound() -> None:
    """Theorem 6: a certified norm, or the radius of a cache, may stand for the smaller true number."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        weight, sparse, low_rank, radius, size, factor = generator.exponential(size=6)
        budgets = {"radius": radius, "sparse_norm": sparse, "low_rank_norm": low_rank}
        named = {"error": 0.0, "size": size, "weight_norm": weight}
        bound = composition_bound(**named, **budgets).bound
        for name, budget in budgets.items():
            assert composition_bound(**named, **(budgets | {name: budget * (1 + factor)})).bound >= bound
            assert composition_bound(**named, **(budgets | {name: budget / (1 + factor)})).bound <= bound


def test_token_certificate_by_sampling_inside_and_outside_its_radius() -> None:
    """No movement below the radius changes a prediction; one a little above the exact one does."""
    W, h = rand(40, 12, seed=3), rand(60, 12, seed=4)
    still = argmax_unchanged_of_state_error(h, h, W)
    assert (still.moved == 0).all()
    assert not still.changed.any()
    assert (still.radius > 0).all()
    radius = torch.from_numpy(still.radius)
    for seed in range(20):
        direction = torch.nn.functional.normalize(rand(60, 12, seed=100 + seed), dim=-1)
        moved = argmax_unchanged_of_state_error(h, h + 0.999 * radius.unsqueeze(-1) * direction, W)
        assert moved.certified.all()
        assert not moved.changed.any()
        assert moved.violations == ()
    z = h @ W.T
    first, second = z.topk(2).indices.T
    away = W[second] - W[first]
    needed = (z.gather(1, first[:, None]) - z.gather(1, second[:, None])) / away.square().sum(-1, keepdim=True)
    flipped = argmax_unchanged_of_state_error(h, h + 1.001 * needed * away, W)
    assert flipped.changed.all()
    assert not flipped.certified.any()


def test_the_difference_of_rows_certifies_more_and_exactly() -> None:
    """Inside the radius no direction changes a prediction; along the difference of the two rows it is exact."""
    W, h = rand(40, 12, seed=3), rand(60, 12, seed=4)
    b = rand(40, seed=5)
    still = argmax_unchanged_of_row_difference(h, h, W, b)
    norms = argmax_unchanged_of_state_error(h, h, W, b)
    assert (still.radius > norms.radius).all()
    assert np.median(still.radius / norms.radius) > 1.2
    radius = torch.from_numpy(still.radius)
    z = h @ W.T + b
    first = z.argmax(-1)
    apart = torch.linalg.vector_norm(W[first].unsqueeze(1) - W, dim=-1)
    exact = ((z.gather(1, first[:, None]) - z) / apart).scatter(1, first[:, None], torch.inf)
    np.testing.assert_allclose(still.radius, exact.amin(-1).numpy(), rtol=1e-10)
    rival = W[exact.argmin(-1)] - W[first]
    towards = torch.nn.functional.normalize(rival, dim=-1)
    for direction in (towards, *(torch.nn.functional.normalize(rand(60, 12, seed=100 + s), dim=-1) for s in range(20))):
        moved = argmax_unchanged_of_row_difference(h, h + 0.999 * radius.unsqueeze(-1) * direction, W, b)
        assert moved.certified.all()
        assert not moved.changed.any()
    beyond = argmax_unchanged_of_row_difference(h, h + 1.001 * radius.unsqueeze(-1) * towards, W, b)
    assert beyond.changed.all()
    assert not beyond.certified.any()


def test_rows_that_no_state_tells_apart_are_a_tie_or_decided_by_the_bias() -> None:
    W, h = torch.zeros(2, 3, dtype=torch.float64), rand(4, 3)
    for bias, sure in ((torch.zeros(2), False), (torch.tensor([0.0, 1.0]), True)):
        for checker in (argmax_unchanged_of_state_error, argmax_unchanged_of_row_difference):
            assert (checker(h, -h, W, bias).certified == sure).all()
    assert not argmax_unchanged_of_row_difference(rand(5, 3), rand(5, 3), torch.ones(2, 3)).certified.any()


def test_token_certificate_sees_a_planted_violation_and_survives_saving(tmp_path) -> None:  # type: ignore[no-untyped-def]
    W, h = rand(10, 5), rand(4, 5, seed=1)
    found = argmax_unchanged_of_state_error(h, -h, W, bias=rand(10, seed=2))
    assert found.violations == ()
    lied = TokenCertificate(radius=found.radius + 100, moved=found.moved, changed=found.changed)
    assert lied.violations == tuple(np.flatnonzero(found.changed))
    assert lied.violations
    again = TokenCertificate.load(lied.save(tmp_path / "tokens.json"))
    assert again.violations == lied.violations
    assert again.changed.dtype == bool
    assert str(again) == str(lied)


def test_flags_of_older_files_are_flags(tmp_path: Path) -> None:
    """They were written as 0.0 and 1.0."""
    found = argmax_unchanged_of_state_error(rand(4, 5), -rand(4, 5), rand(10, 5))
    content = found.to_json() | {"changed": found.changed.astype(float).tolist()}
    (tmp_path / "old.json").write_text(json.dumps(content))
    old = TokenCertificate.load(tmp_path / "old.json")
    assert old.changed.dtype == bool
    assert old.changed.tolist() == found.changed.tolist()


def test_token_certificate_uses_the_bias() -> None:
    W, h = torch.eye(3, dtype=torch.float64), torch.tensor([[1.0, 0.0, 0.0]])
    plain = argmax_unchanged_of_state_error(h, h, W)
    biased = argmax_unchanged_of_state_error(h, h, W, bias=torch.tensor([0.0, 0.5, 0.0]))
    assert plain.radius[0] == pytest.approx(0.5)
    assert biased.radius[0] == pytest.approx(0.25)


def test_a_tie_is_never_certified() -> None:
    W = torch.ones(2, 3, dtype=torch.float64)
    assert not argmax_unchanged_of_state_error(rand(5, 3), rand(5, 3), W).certified.any()


def margin_of(bound: float, rounding: float) -> float:
    """Rounding of the error, and of the bound itself: 2⁻³⁷ of it."""
    return rounding + 2.0**-37 * bound


@pytest.mark.parametrize("unit", [2.0**-52, 2.0**-23])
def test_margins_are_those_that_the_rounding_of_each_step_accounts_for(unit: float) -> None:
    """Wider they would hide a violation, narrower they would see one in rounding."""
    composed = trajectory_error_le([1.0, 2.0, 5.0], [2.0, 3.0], [0.5, 0.25], unit=unit)
    for n, (check, bound) in enumerate(zip(composed, (2.5, 7.75), strict=True)):
        assert check.bound == bound
        assert check.margin == pytest.approx(margin_of(bound, 8 * (n + 2) * unit * bound), rel=1e-12, abs=0)
    geometric = lyapunov_contraction_bound([1.0, 0.1, 0.1, 0.65], 0.5, 0.25, unit=unit)
    bound = 0.5**3 + 0.25 * (1 + 0.5 + 0.25)  # the last error is the worst of the three
    assert (geometric.error, geometric.inputs) == (0.65, 3)
    assert geometric.bound == pytest.approx(bound, rel=1e-12, abs=0)
    assert geometric.margin == pytest.approx(margin_of(bound, 8 * 4 * unit * bound), rel=1e-12, abs=0)
    (falls,) = residual_growth_contraction([2.0, 0.5], [1.0], [2.0], unit=unit)
    assert falls.bound == 1.0
    assert falls.margin == pytest.approx(margin_of(1.0, 16 * unit * 2.0), rel=1e-12, abs=0)
    aligned = preln_contraction_sufficient(0.1, 0.5, 0.5, 2.0, unit=unit)
    assert aligned is not None
    assert aligned.bound == pytest.approx(1.5**2 / (1 + 2 + 4), rel=1e-12, abs=0)
    assert aligned.margin == pytest.approx(margin_of(aligned.bound, 32 * unit * aligned.bound), rel=1e-12, abs=0)


def test_growth_that_only_equals_that_of_the_state_promises_nothing() -> None:
    assert residual_growth_contraction([1.0, 1.0], [2.0], [2.0]) == ()
    assert preln_contraction_sufficient(1.0, 1.0, 1.0, 1.0) is None  # (1 + 1)² against 1 + 2 + 1


def test_each_checker_takes_its_numbers_in_their_places() -> None:
    check = retrieval_bound([1.0, 3.0], [1.0, 1.0], 2.0, rounding=[0.25, 0.5], matrix="m", layer=4)
    assert (check.error, check.bound, check.inputs, check.layer, check.estimate) == (3.0, 2.0, 2, 4, False)
    assert check.margin == pytest.approx(margin_of(2.0, 0.5), rel=1e-12, abs=0)
    composed = composition_bound(
        1.0, 3.0, 5.0, weight_norm=7.0, sparse_norm=11.0, low_rank_norm=13.0, rounding=0.5, matrix="m", layer=0
    )
    assert composed.bound == 7 * 5 + (11 + 13) * 3
    assert composed.margin == pytest.approx(margin_of(composed.bound, 0.5), rel=1e-12, abs=0)


def test_of_two_checks_one_that_holds_is_never_the_worse() -> None:
    """A margin may make the one of larger error / bound hold."""
    wide = BoundCheck("t", "m", 0, error=3.0, bound=1.0, margin=5.0, inputs=1)
    broken = BoundCheck("t", "m", 0, error=1.1, bound=1.0, margin=0.0, inputs=2)
    for worst in (wide.with_more(broken), broken.with_more(wide)):
        assert (worst.error, worst.inputs) == (1.1, 3)
    exact = BoundCheck("t", "m", 0, error=1.5, bound=1.0, margin=0.5, inputs=1)
    assert exact.holds
    assert not BoundCheck("t", "m", 0, error=1.5000001, bound=1.0, margin=0.5, inputs=1).holds


WIDE = 4000  # so many entries that what rounding is given can be told from 1


def test_what_the_certificate_leaves_to_rounding() -> None:
    """u = 2⁻⁵² (d + 8): of every norm and product, twice of the bias; and as much again of the radius and the move."""
    unit = 2.0**-52 * (WIDE + 8)
    W = torch.zeros(3, WIDE, dtype=torch.float64)
    W[0, 0], W[1, 1], W[2, 2] = 3.0, 4.0, 1.0
    h = torch.zeros(1, WIDE, dtype=torch.float64)
    h[0, 0] = 1.0
    b = torch.tensor([0.0, -2.0, -50.0], dtype=torch.float64)
    found = argmax_unchanged_of_state_error(h, 1.5 * h, W, b)
    given = unit * (7 * 1 + 2 * 50)
    assert found.radius[0] == pytest.approx((5 - given) / 7 * (1 - unit), rel=1e-15, abs=0)
    assert 5 / 7 - found.radius[0] == pytest.approx((given + 5 * unit) / 7, rel=1e-3, abs=0)
    assert found.moved[0] / 0.5 - 1 == pytest.approx(unit, rel=1e-2, abs=0)
    apart = argmax_unchanged_of_row_difference(h, 1.5 * h, W, b)
    # ‖w_i − w_j‖² = 9 + 16, of which 2 u (9 + 16) may be rounding.
    assert 1 - apart.radius[0] == pytest.approx(given / 5 + unit + unit, rel=1e-3, abs=0)


@pytest.mark.parametrize("width", [8, 12, 40])
def test_equal_rows_are_as_far_apart_as_rounding_may_make_them(width: int) -> None:
    W = torch.zeros(2, width, dtype=torch.float64)
    W[:, 0] = 2.0
    norms = torch.linalg.vector_norm(W, dim=-1)
    found = _distance(W, norms.unsqueeze(-1), W, norms)
    np.testing.assert_allclose(found.numpy(), np.sqrt(2 * 2.0**-52 * (width + 8) * (4 + 4)), rtol=1e-12)


def test_tokens_and_rows_beyond_those_of_one_block_are_certified_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    W, h = rand(9, 5), rand(130, 5, seed=1)
    monkeypatch.setattr(decision, "_ENTRIES", 9 * 64)
    monkeypatch.setattr(decision, "_COLUMNS", 4)
    whole = argmax_unchanged_of_state_error(h, h + 0.01, W)
    for at in (0, 63, 64, 129):
        one = argmax_unchanged_of_state_error(h[at : at + 1], h[at : at + 1] + 0.01, W)
        assert (one.radius[0], one.moved[0]) == pytest.approx((whole.radius[at], whole.moved[at]), rel=1e-12, abs=0)
