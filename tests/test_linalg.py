"""Certified norms against norms in 60-digit arithmetic, on everything that might break them."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest
import scipy.sparse.linalg
import torch
from helpers import rand
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune import linalg as norms
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import certified_norm, certify, exact_norm, feature_energy, token_energy
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.structure import find_structure

TINIEST = 5e-324


def true_norm(W: torch.Tensor) -> mpmath.mpf:
    """The largest singular value of the matrix as stored, to 60 digits."""
    with mpmath.workdps(60):
        rows = [[mpmath.mpf(v) for v in row] for row in W.double().tolist()]
        scale = max((abs(v) for row in rows for v in row), default=mpmath.mpf(0))
        if scale == 0:
            return mpmath.mpf(0)
        A = mpmath.matrix([[v / scale for v in row] for row in rows])
        return scale * max(mpmath.svd_r(A if A.rows >= A.cols else A.T, compute_uv=False))


def assert_certified(W: torch.Tensor) -> None:
    truth, bound = true_norm(W), certified_norm(W)
    assert mpmath.mpf(bound) >= truth
    assert mpmath.mpf(bound) <= truth * mpmath.mpf("1.001") + 2 * mpmath.mpf(TINIEST)
    # The other two are no bounds, and close.
    assert abs(mpmath.mpf(exact_norm(W)) - truth) <= truth * mpmath.mpf("1e-13") + 2 * mpmath.mpf(TINIEST)
    estimate = mpmath.mpf(certify(W).estimate)
    assert truth * mpmath.mpf("0.99") - 2 * mpmath.mpf(TINIEST) <= estimate
    assert estimate <= truth * (1 + mpmath.mpf("1e-13")) + 2 * mpmath.mpf(TINIEST)


def orthogonal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(rand(n, n, seed=seed)).Q


NASTY = {
    "plain": rand(12, 20),
    "tall": rand(20, 12),
    "row": rand(1, 30),
    "column": rand(30, 1),
    "one entry": torch.tensor([[-3.7]], dtype=torch.float64),
    "identity": torch.eye(15, dtype=torch.float64),
    "orthogonal": orthogonal(16),
    "nearly equal singular values": orthogonal(12) @ torch.diag(1 + 1e-13 * rand(12)) @ orthogonal(12, 1),
    "rank one": torch.outer(rand(14), rand(18, seed=1)),
    "rank two of nine": rand(9, 2) @ rand(2, 9, seed=1),
    "all equal": torch.full((8, 11), 0.1, dtype=torch.float64),
    "hilbert": torch.tensor([[1.0 / (i + j + 1) for j in range(12)] for i in range(12)], dtype=torch.float64),
    "rows of every scale": rand(10, 10) * torch.logspace(-150, 150, 10, dtype=torch.float64).unsqueeze(1),
    "columns of every scale": rand(10, 10) * torch.logspace(-300, 5, 10, dtype=torch.float64),
    "huge": rand(9, 13) * 1e300,
    "near overflow": torch.eye(4, dtype=torch.float64) * 1.7e308,
    "tiny": rand(9, 13) * 1e-300,
    "denormal": rand(9, 13) * 1e-310,
    "smallest denormals": torch.randint(-3, 4, (6, 7), generator=torch.Generator().manual_seed(0)).double() * TINIEST,
    "huge and denormal": torch.tensor([[1e300, 1e-310], [-1e-310, 1e300]], dtype=torch.float64),
    "one outlier": rand(10, 12) * 1e-9 + torch.eye(10, 12, dtype=torch.float64) * torch.tensor([1.0] + [0.0] * 11),
    "zero rows": torch.cat([rand(5, 8), torch.zeros(5, 8, dtype=torch.float64)]),
    "jordan": torch.eye(12, dtype=torch.float64) + torch.diag(torch.ones(11, dtype=torch.float64), 1),
    "graded": torch.triu(rand(10, 10)) * torch.logspace(0, -60, 10, dtype=torch.float64),
    "float32": rand(11, 9).float(),
    "float16": rand(11, 9).half(),
    "float16 denormal": (rand(11, 9) * 1e-7).half(),
    "bfloat16": rand(11, 9).bfloat16(),
    "bfloat16 huge": (rand(11, 9) * 1e38).bfloat16(),
    "not contiguous": rand(20, 30)[::2, ::3],
}


@pytest.mark.parametrize("name", NASTY)
def test_certified_norm_of_nasty_matrices(name: str) -> None:
    assert_certified(NASTY[name])


@settings(max_examples=150)
@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    data=st.data(),
    exponent=st.integers(-1080, 1000),
    spread=st.integers(0, 60),
)
def test_certified_norm_by_property(rows: int, columns: int, data: st.DataObject, exponent: int, spread: int) -> None:
    numbers = data.draw(
        st.lists(
            st.tuples(st.floats(-1, 1, allow_subnormal=True), st.integers(-spread, 0)),
            min_size=rows * columns,
            max_size=rows * columns,
        )
    )
    values = [math.ldexp(value, exponent + shift) for value, shift in numbers]
    assert_certified(torch.tensor(values, dtype=torch.float64).view(rows, columns))


@settings(max_examples=40)
@given(
    rows=st.integers(2, 200),
    columns=st.integers(2, 200),
    seed=st.integers(0, 10**6),
    decay=st.floats(0, 8),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_certified_norm_of_larger_matrices(
    rows: int, columns: int, seed: int, decay: float, dtype: torch.dtype
) -> None:
    """Against the SVD in float64, whose own error is far below the certificate's excess of 5e-5."""
    rank = min(rows, columns)
    spectrum = torch.arange(1, rank + 1, dtype=torch.float64).pow(-decay)
    W = ((rand(rows, rank, seed=seed) * spectrum) @ rand(rank, columns, seed=seed + 1)).to(dtype)
    norm = float(torch.linalg.svdvals(W.double())[0])
    assert norm <= certified_norm(W) <= 1.001 * norm
    assert 0.99 * norm <= certify(W).estimate <= norm * (1 + 1e-12)


def test_empty_and_zero() -> None:
    for shape in ((0, 0), (0, 5), (5, 0), (4, 3)):
        for norm in (certified_norm, exact_norm):
            assert norm(torch.zeros(shape)) == 0.0
        assert norms.certify(torch.zeros(shape)).direction.shape == (shape[1],)


@pytest.mark.parametrize("norm", [certified_norm, exact_norm])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(norm, bad: float) -> None:  # type: ignore[no-untyped-def]
    W = rand(5, 6)
    W[3, 2] = bad
    with pytest.raises(LyapunovPruneError, match="NaN or infinity"):
        norm(W)


def test_what_is_no_real_matrix_is_refused() -> None:
    for W in (torch.zeros(3), torch.zeros(2, 2, 2), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2).cfloat()):
        with pytest.raises(LyapunovPruneError, match="real matrix"):
            certified_norm(W)


def test_a_norm_beyond_float64_is_refused() -> None:
    with pytest.raises(LyapunovPruneError, match="beyond float64"):
        certified_norm(torch.full((3, 3), 1.5e308, dtype=torch.float64))


def test_direction_attains_the_estimate() -> None:
    for shape in ((30, 50), (50, 30), (300, 200), (1, 9), (9, 1)):
        W = rand(*shape)
        found = norms.certify(W)
        assert float(torch.linalg.vector_norm(found.direction)) == pytest.approx(1, rel=1e-12)
        assert float(torch.linalg.vector_norm(W @ found.direction)) == pytest.approx(found.estimate, rel=1e-12)
        assert found.estimate <= found.bound <= 1.001 * found.estimate


def test_input_is_left_alone() -> None:
    W = rand(6, 4)
    before = W.clone()
    certified_norm(W), exact_norm(W)
    assert torch.equal(W, before)


@pytest.mark.parametrize("size", [20, 200])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.999])
def test_a_guess_too_low_does_not_matter(monkeypatch: pytest.MonkeyPatch, size: int, share: float) -> None:
    """Planted fault: whatever the eigensolvers say, the Cholesky test stands between them and the bound."""
    W = rand(size, size)
    norm = exact_norm(W)
    eigsh, eigh, eigvalsh = scipy.sparse.linalg.eigsh, torch.linalg.eigh, torch.linalg.eigvalsh
    monkeypatch.setattr(scipy.sparse.linalg, "eigsh", lambda G, **how: (eigsh(G, **how)[0] * share, eigsh(G, **how)[1]))
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda G: eigvalsh(G) * share)
    if size <= norms._SMALL:
        monkeypatch.setattr(torch.linalg, "eigh", lambda G: (eigh(G)[0] * share, eigh(G)[1]))
    assert certified_norm(W) >= norm


def test_the_gram_test_refuses_a_norm_from_below() -> None:
    """The part that certifies: no `t` below the true `‖A‖²` passes, however close."""
    A = rand(40, 60)
    G = A @ A.T
    top = float(torch.linalg.eigvalsh(G)[-1])
    for below in (1e-3, 1e-6, 1e-9):
        _, info = torch.linalg.cholesky_ex(top * (1 - below) * torch.eye(40, dtype=torch.float64) - G)
        assert int(info) != 0
    # and with a guess just below, what comes out has been raised above it
    assert norms._gram_bound(G, 60, top * (1 - 1e-9), math.inf) >= math.sqrt(top) * (1 - 1e-15)


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_matrices_of_the_builtin_model(smollm2: Decoder) -> None:
    """Within 0.1 %, never below, for weights and for the residuals of magnitude pruning."""
    layers = find_structure(smollm2.model).layers
    weights = [p.detach() for p in layers.parameters() if p.ndim == 2]
    assert len(weights) == 210
    for W in weights[::30]:  # each of the seven kinds once
        limit = W.abs().flatten().kthvalue(W.numel() // 2).values
        for A in (W, torch.where(W.abs() <= limit, W, 0)):
            exact = exact_norm(A)
            assert exact * (1 - 1e-12) <= certified_norm(A) <= 1.001 * exact


@pytest.mark.parametrize("columns", [512, 4096])
@pytest.mark.parametrize("slack", [0.9, 1.9])
def test_the_margin_covers_a_gram_matrix_that_was_rounded_down(
    columns: int, slack: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Ĝ = (1 − slack · γ_q) G`, as far below as the doubled γ admits, and the least `t` that Cholesky passes.

    Three equal rows of positive numbers, whose norm is an exact rational: `‖A‖² = 3 Σ v²`, and `|A| |A|ᵀ = G`. The
    planted faults: `sqrt(t)` for `sqrt(t + δ)` fails for both, half the γ for 1.9.
    """
    v = torch.rand(columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2 + 0.49
    square = 3 * sum((Fraction(x) ** 2 for x in v.tolist()), Fraction(0))
    u = Fraction(1, 2**53)
    rounded = square / 3 * (1 - Fraction(slack) * columns * u / (1 - columns * u))
    G = torch.full((3, 3), float(rounded), dtype=torch.float64)

    def passes(t: float) -> bool:
        return int(torch.linalg.cholesky_ex(t * torch.eye(3, dtype=torch.float64) - G).info) == 0

    low, high = float(3 * rounded) * (1 - 1e-9), float(3 * rounded) * (1 + 1e-9)
    while math.nextafter(low, high) < high:
        middle = (low + high) / 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    assert Fraction(high) < square  # without a margin the bound would be too small
    monkeypatch.setattr(norms, "_EXCESS", 0.0)
    assert Fraction(norms._gram_bound(G, columns, high, math.inf)) ** 2 >= square


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 50, 576), (700, 1024), (2, 300_001), (7,), (0, 5), (2, 0)])
def test_energies_are_those_of_float64_however_many_rows_are_widened_at_once(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    close = {"rtol": 1e-13, "atol": 0.0}
    torch.testing.assert_close(token_energy(x), x.double().square().sum(-1), **close)
    if x.ndim == 2:
        torch.testing.assert_close(feature_energy(x), x.double().square().sum(0), **close)
