"""What the second-order methods compress in place of a matrix, against the least squares that it solves."""

from __future__ import annotations

import pytest
import torch

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression import second_order as module
from lyapunov_prune.compression.methods.gptq import GPTQ
from lyapunov_prune.compression.methods.sparsegpt import SparseGPT
from lyapunov_prune.errors import LyapunovPruneError

METHODS: list[tuple[type[GPTQ] | type[SparseGPT], float]] = [(GPTQ, 3), (SparseGPT, 0.5)]


def drawn(seed: int, tokens: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix (6 × 12), its inputs in the dense and in the compressed model, and weights of the tokens."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    before = (normal(12, 12) + 2 * normal(12, 1)) @ normal(12, tokens)
    after = before + 0.3 * normal(12, 12) @ before + 0.5 * normal(12, tokens)
    return normal(6, 12), before, after, torch.rand(tokens, generator=g, dtype=torch.float64) + 0.1


def sums(before: torch.Tensor, after: torch.Tensor, a: torch.Tensor) -> Statistics:
    gram = (after * a) @ after.T
    return Statistics(gram.diagonal().sqrt(), gram, drift=((before - after) * a) @ after.T)


def error(W: torch.Tensor, found: torch.Tensor, before: torch.Tensor, after: torch.Tensor, a: torch.Tensor) -> float:
    return float(((W @ before - found @ after).square() * a).sum())


@pytest.mark.parametrize("kind", [kind for kind, _ in METHODS])
def test_a_full_correction_is_the_least_squares_solution(kind: type[GPTQ] | type[SparseGPT]) -> None:
    W, before, after, a = drawn(0)
    V, H, dead = kind(damping=0.0, correction=1.0).begin(W, sums(before, after, a))
    root = a.sqrt()
    wanted = torch.linalg.lstsq((after * root).T, (W @ before * root).T).solution.T
    torch.testing.assert_close(V, wanted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(H, (after * a) @ after.T)
    assert not dead.any()
    half, _, _ = kind(damping=0.0, correction=0.5).begin(W, sums(before, after, a))
    torch.testing.assert_close(half, (W + wanted) / 2, rtol=1e-8, atol=1e-8)


def test_the_objective_is_that_of_the_corrected_matrix_and_a_constant() -> None:
    W, before, after, a = drawn(1)
    V, H, _ = GPTQ(damping=0.0, correction=1.0).begin(W, sums(before, after, a))
    left = error(W, V, before, after, a)
    for seed in range(3):
        other = V + torch.randn(6, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        moved = float((((V - other) @ H) * (V - other)).sum())
        assert error(W, other, before, after, a) == pytest.approx(left + moved, rel=1e-9)


@pytest.mark.parametrize(("kind", "amount"), METHODS)
def test_outputs_are_nearer_to_the_dense_models(kind: type[GPTQ] | type[SparseGPT], amount: float) -> None:
    ratios = []
    for seed in range(20):
        W, before, after, a = drawn(seed)
        found = [kind(correction=c)(W, amount, sums(before, after, a)) for c in (0.0, 1.0)]
        plain, corrected = (error(W, each, before, after, a) for each in found)
        ratios.append(corrected / plain)
    assert max(ratios) < 1
    assert sum(ratios) / len(ratios) < 0.7


@pytest.mark.parametrize(("kind", "amount"), METHODS)
def test_inputs_that_have_not_changed_are_not_corrected_for(kind: type[GPTQ] | type[SparseGPT], amount: float) -> None:
    W, before, _, a = drawn(2)
    statistics = sums(before, before, a)
    assert torch.equal(kind(correction=1.0)(W, amount, statistics), kind()(W, amount, statistics))


@pytest.mark.parametrize(("kind", "amount"), METHODS)
def test_a_correction_without_the_dense_models_inputs_is_refused(
    kind: type[GPTQ] | type[SparseGPT], amount: float
) -> None:
    W, before, _, a = drawn(4)
    gram = sums(before, before, a).gram
    assert gram is not None
    with pytest.raises(LyapunovPruneError, match="correction"):
        kind(correction=0.5)(W, amount, Statistics(gram.diagonal().sqrt(), gram))
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(LyapunovPruneError, match="correction"):
            kind(correction=wrong)


def test_a_sweep_leaves_what_it_was_given() -> None:
    W, before, _, a = drawn(5)
    gram = sums(before, before, a).gram
    assert gram is not None
    given = W.clone()
    module.swept(W, module.inverse_factor(gram), lambda j, V: V[:, j].round(), 4)
    assert torch.equal(W, given)
