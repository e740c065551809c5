"""Widths of layers: the least cost within a budget, by trying all, and what each schedule calls cost."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from helpers import LAYERS
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import milp
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, allocate
from lyapunov_prune.allocation import Allocation
from lyapunov_prune.allocation.allocation import Matrices
from lyapunov_prune.allocation.bit_widths import evenly, least_cost
from lyapunov_prune.allocation.schedules.bits_kl import BitsKL
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap

WIDTHS = (2, 3, 4, 8, 16)


class Known:
    """A cost that rises with depth and falls with the width; what was chosen, and uniform bits, cost `held_out`."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, held_out: tuple[float, float] = (1.0, 2.0)) -> None:
        self.measured_on, self.held_out = read(wrap(model), ids).measured_on(), [*held_out]

    def __call__(self, widths: tuple[int, ...]) -> np.ndarray:
        return 3.0 ** np.arange(LAYERS)[:, None] / np.array(widths)

    def together(self, allocations: Sequence[Allocation]) -> list[float]:
        return self.held_out


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.floats(2, 17), st.floats(0, 20))
def test_no_other_widths_that_fit_cost_less(seed: int, layers: int, budget: float, spread: float) -> None:
    rng = np.random.default_rng(seed)
    cost, sizes = rng.lognormal(0, 3, (layers, 4)), rng.integers(1, 9, layers)
    cost *= np.exp(-spread * rng.random((layers, 1)))  # layers whose costs are far below those of others
    widths = np.array([2, 3, 4, 8])
    picks = np.array([*itertools.product(range(4), repeat=layers)])
    fits = widths[picks] @ sizes <= budget * sizes.sum() * (1 + 1e-12)
    best = cost[np.arange(layers), picks].sum(1)[fits].min()
    found = least_cost(cost, widths, sizes, budget)
    assert np.dot(found, sizes) <= budget * sizes.sum() * (1 + 1e-9)
    assert cost[np.arange(layers), np.searchsorted(widths, found)].sum() <= best * (1 + 1e-9)


def test_what_the_solver_prints_is_dropped(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def talking(*args: Any, **kwargs: Any) -> Any:
        ctypes.CDLL(None).puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        return milp(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "milp", talking)
    assert least_cost(np.array([[2.0, 1.0], [3.0, 1.0]]), np.array([2, 4]), np.ones(2), 3.0).tolist() == [2, 4]
    print("a result")
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == "a result\n"


@pytest.mark.parametrize("budget", [2.0, 3.0, 4.5, 9.0, 16.0])
def test_the_budget_is_kept_with_one_width_a_layer(
    budget: float, llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path
) -> None:
    found = allocate(llama, "bits-kl", budget, cost=Known(llama, ids))
    assert (found.schedule, found.unit, found.budget) == ("bits-kl", "bits", budget)
    assert budget - 4 <= found.mean <= budget * (1 + 1e-12)
    assert {*found.amount} <= {*map(float, WIDTHS)}
    for layer in range(LAYERS):
        assert len({a for a, k in zip(found.amount, found.layers, strict=True) if k == layer}) == 1
    assert len(found.measured_on) == 1
    assert str(Allocation.load(found.save(tmp_path / "allocation.json"))) == str(found)


def test_layers_that_cost_more_get_no_fewer_bits(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    assert (np.diff(allocate(llama, "bits-kl", 4.0, cost=Known(llama, ids)).by_layer()) >= 0).all()


def test_uniform_bits_are_taken_where_they_cost_less(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    even = evenly(Matrices.of(llama), 4.5, WIDTHS)
    for own, uniform, taken in ((1.0, 2.0, False), (2.0, 1.0, True), (float("nan"), 1.0, True), (1.0, 1.0, True)):
        found = allocate(llama, "bits-kl", 4.5, cost=Known(llama, ids, (own, uniform)))
        assert bool((found.amount == even.amount).all()) is taken
        assert found.parameters["KL of uniform bits, used to choose"] == uniform


@pytest.mark.parametrize("budget", [2.0, 2.9, 4.0, 4.5, 7.0, 16.0, 20.0])
def test_uniform_bits_spend_what_whole_layers_can(budget: float, llama: PreTrainedModel) -> None:
    """The layers of the tiny model are of one size."""
    found = evenly(Matrices.of(llama), budget, WIDTHS)
    narrow = max(b for b in WIDTHS if b <= budget)
    wider = next((b for b in WIDTHS if b > budget), None)
    count = int(LAYERS * (budget - narrow) / (wider - narrow)) if wider else 0
    assert sorted(found.by_layer()) == sorted([float(narrow)] * (LAYERS - count) + [float(wider or 0)] * count)


def test_what_cannot_be_met_or_has_no_sense_is_refused(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match=r"narrower than 2 bits.*1\.5"):
        allocate(llama, "bits-kl", 1.5, cost=Known(llama, ids))
    with pytest.raises(LyapunovPruneError, match="nan"):
        allocate(llama, "bits-kl", float("nan"), cost=Known(llama, ids))
    for widths in ((4,), (8, 4), (1, 4), (4, 12), (4, 4, 8)):
        with pytest.raises(LyapunovPruneError, match="in rising order"):
            BitsKL(widths)
    with pytest.raises(LyapunovPruneError, match=r"NaN .*costs"):
        least_cost(np.array([[1.0, 2.0], [np.nan, 1.0]]), np.array([2, 4]), np.ones(2), 3.0)
