"""What the travelling error is drawn from and summed to, against sums by hand in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import make_tiny

from lyapunov_prune import LyapunovPruneError, NonFiniteError
from lyapunov_prune.models.device import differentiable
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.propagation import (
    MOST_SEEDS,
    RESAMPLES,
    Energies,
    WindowSums,
    _collect,
    _reduce,
    difference_sums,
    direction,
    drawn_windows,
    jvp_sums,
    listed,
    perturbed,
)


def test_as_many_seeds_as_there_may_be_and_no_more() -> None:
    assert len(listed(range(MOST_SEEDS))) == MOST_SEEDS == 1000
    for many in (MOST_SEEDS + 1, 10**9):
        with pytest.raises(LyapunovPruneError, match="1 to 1,000 seeds"):
            listed(range(many))
    with pytest.raises(LyapunovPruneError, match="1 to 1,000 seeds"):
        listed(())
    assert listed([3.0, 1]) == (3, 1)  # type: ignore[list-item]


def test_directions_are_of_each_window_and_seed_and_as_long_as_the_state() -> None:
    hidden = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    found = direction(hidden, 7, 2)
    torch.testing.assert_close(found.norm(dim=-1), hidden.norm(dim=-1))
    for window in range(3):
        noise = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * 1_000_003 + 7 + window)).double()
        along = noise / noise.norm(dim=-1, keepdim=True) * hidden[window].norm(dim=-1, keepdim=True)
        torch.testing.assert_close(found[window], along, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(direction(hidden[1:], 8, 2), found[1:])


def test_copies_are_moved_and_the_clean_rows_are_not() -> None:
    hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double().repeat(3, 1, 1)
    moved = perturbed(2, 5, (0, 9), 0.25)(hidden)
    assert torch.equal(moved[:2], hidden[:2])
    for k, seed in ((1, 0), (2, 9)):
        torch.testing.assert_close(moved[2 * k : 2 * k + 2], hidden[:2] + 0.25 * direction(hidden[:2], 5, seed))
    moved = perturbed(2, 5, (9, 9), (0.5, 0.25))(hidden)
    for k, size in ((1, 0.5), (2, 0.25)):
        torch.testing.assert_close(moved[2 * k : 2 * k + 2], hidden[:2] + size * direction(hidden[:2], 5, 9))


STATE = torch.tensor([[4.0, 0.0, 1.0], [1.0, 2.0, 9.0]]).double()
ERRORS = torch.tensor([[[1.0, 5.0, 1.0], [2.0, 2.0, 3.0]], [[2.0, 0.0, 3.0], [0.0, 1.0, 18.0]]]).double()


def test_a_boundary_is_summed_over_its_tokens() -> None:
    state, error, relative, peak, peak_error = (part.numpy() for part in _reduce(STATE, ERRORS))
    assert state.tolist() == [5, 12]
    assert error.tolist() == [[7, 7], [5, 19]]
    # A token whose state is zero counts as none, and as a token.
    np.testing.assert_allclose(relative, [[(1 / 4 + 1) / 3, (2 + 1 + 1 / 3) / 3], [(2 / 4 + 3) / 3, (1 / 2 + 2) / 3]])
    assert peak.tolist() == [4, 9]
    assert peak_error.tolist() == [[1, 3], [2, 18]]


@pytest.mark.parametrize("part", ["state", "error"])
@pytest.mark.parametrize("first", [0, 3])
def test_the_first_boundary_that_is_not_finite_is_named(part: str, first: int) -> None:
    state, errors = STATE.clone(), ERRORS.clone()
    if part == "state":
        state[1, 0] = torch.inf
    else:
        errors[1, 0, 2] = torch.nan
    rows = [(at, _reduce(*((state, errors) if at >= first else (STATE, ERRORS)))) for at in (0, 3, 4)]
    with pytest.raises(NonFiniteError, match=r"\(windows 1 to 2\)") as caught:
        _collect(rows, "windows 1 to 2")
    assert caught.value.layer == first
    found = _collect([(0, _reduce(STATE, ERRORS)), (1, _reduce(2 * STATE, ERRORS))], "")
    assert found.state.tolist() == [[5, 12], [10, 24]]


def test_energies_are_pooled_over_tokens_or_over_all() -> None:
    rng = np.random.default_rng(0)
    state, error = rng.gamma(3, size=(3, 4)), rng.gamma(3, size=(3, 2, 4))
    found = Energies(state, error, error / state[:, None])
    for k in range(3):
        both = np.mean([error[k, s].sum() / state[k].sum() for s in range(2)])
        assert found.energy("energy")[k] == pytest.approx(both)
        each = np.mean([error[k, s, w] / state[k, w] for s in range(2) for w in range(4)])
        assert found.energy("token")[k] == pytest.approx(each)


@pytest.mark.parametrize("pooling", ["energy", "token"])
def test_draws_weigh_windows_and_seeds(pooling: str) -> None:
    """Each draw as energies of the windows and seeds that were drawn, put side by side."""
    rng = np.random.default_rng(0)
    state, error = rng.gamma(3, size=(3, 4)), rng.gamma(3, size=(3, 2, 4))
    relative = rng.gamma(3, size=(3, 2, 4))
    found = Energies(state, error, relative).drawn(pooling)
    assert found.shape == (RESAMPLES, 2)
    again = np.random.default_rng(0)
    windows, seeds = again.multinomial(4, [1 / 4] * 4, RESAMPLES), again.multinomial(2, [1 / 2] * 2, RESAMPLES)
    np.testing.assert_array_equal(drawn_windows(4), windows)
    for draw in range(50):
        w, s = np.repeat(range(4), windows[draw]), np.repeat(range(2), seeds[draw])
        taken = Energies(state[:, w], error[:, s][:, :, w], relative[:, s][:, :, w]).energy(pooling)
        np.testing.assert_allclose(found[draw], taken[1:] / taken[:-1], rtol=1e-12)
    interval = Energies(state, error, relative).interval(pooling)
    np.testing.assert_allclose(interval, np.quantile(found, [0.025, 0.975], axis=0).T)
    one_window, one_seed = (Energies(state[:, :w], error[:, :s, :w], relative[:, :s, :w]) for w, s in ((1, 2), (4, 1)))
    assert np.isfinite(one_window.interval(pooling)).all()
    assert np.isfinite(one_seed.interval(pooling)).all()
    assert np.isnan(Energies(state[:, :1], error[:, :1, :1], relative[:, :1, :1]).interval(pooling)).all()


@pytest.mark.parametrize("run", [difference_sums, jvp_sums])
def test_windows_of_any_batch_are_those_of_their_numbers(run: object) -> None:
    assert callable(run)
    structure = find_structure(make_tiny("llama"))
    ids = torch.randint(97, (3, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), differentiable(structure.backbone):
        whole = run(structure, ids, 4, (0, 1), 1e-2)
        parts = [run(structure, ids[:1], 4, (0, 1), 1e-2), run(structure, ids[1:], 5, (0, 1), 1e-2)]
        longer = run(structure, ids, 4, (0, 1), 2e-2)
    joined = WindowSums.join(parts)
    for name, value in vars(whole).items():
        np.testing.assert_allclose(getattr(joined, name), value, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(longer.error[0], 4 * whole.error[0], rtol=1e-4)  # ε² of the state's own energy
    np.testing.assert_allclose(whole.relative[0], 1e-4, rtol=1e-4)
