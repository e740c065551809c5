"""The map from a state to a later one, read off from moved states, against matrices that are known."""

from __future__ import annotations

import math

import pytest
import torch

from lyapunov_prune.profiles.transition import Transition

ROWS, HEADS = 6, 2


def bounds(shape: tuple[int, ...], step, steps: int = 3) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """`Transition.bound` of a state (one window) that follows `step(t, S)` plus an input, with two random errors."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator, dtype=torch.float64)

    clean = drawn()
    transition = Transition(clean, 0.1)
    errors = [0.1 * drawn() for _ in range(2)]
    states = [clean, *(clean + error for error in errors), *(clean + move for move in transition.moves())]
    assert len(states) == 3 + transition.probes
    found = []
    for k in range(steps + 1):
        if k:
            entering = drawn()
            states = [step(k, state) + entering for state in states]
        differences = [state - states[0] for state in states[1:]]
        found.append(float(transition.bound(k, differences[2:], torch.stack(differences[:2]))[0]))
    return torch.tensor(found)


def test_entry_by_entry_it_is_the_largest_product() -> None:
    decay = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    largest = [1.0, *(float(decay[1 : k + 1].prod(0).max()) for k in (1, 2, 3))]
    torch.testing.assert_close(bounds((3, 5), lambda k, S: decay[k] * S), torch.tensor(largest), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("columns", [4, 6, 9])
def test_one_matrix_a_head_is_found_whatever_the_number_of_columns(columns: int) -> None:
    generator = torch.Generator().manual_seed(2)
    keys = torch.nn.functional.normalize(
        torch.randn(4, HEADS, ROWS, 1, generator=generator, dtype=torch.float64), dim=2
    )
    steps = 0.9 * (torch.eye(ROWS, dtype=torch.float64) - 0.7 * keys @ keys.mT)
    norms, product = [1.0], torch.eye(ROWS, dtype=torch.float64)
    for k in (1, 2, 3):
        product = steps[k] @ product
        norms.append(float(torch.linalg.matrix_norm(product, ord=2).max()))
    found = bounds((HEADS, ROWS, columns), lambda k, S: steps[k] @ S)
    torch.testing.assert_close(found, torch.tensor(norms), rtol=1e-5, atol=2e-6)
    assert found[3] < 0.9**3 + 1e-5


@pytest.mark.parametrize("shape", [(5,), (HEADS, ROWS, 4)])
def test_a_recurrence_of_another_form_has_no_bound(shape: tuple[int, ...]) -> None:
    found = bounds(shape, lambda k, S: torch.tanh(S))
    assert found[0] == 1
    assert all(math.isnan(value) for value in found[1:])
