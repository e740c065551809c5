"""Widths of layers: the least cost within a budget, by trying all, and what each schedule calls cost."""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from helpers import LAYERS, assert_same, bits, hooks_of, make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import milp
from transformers import PreTrainedModel

from experiments.bits_kl import RoundingCost, bits_kl, evenly, least_cost
from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.allocation import Allocation
from lyapunov_prune.allocation.allocation import Matrices
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.compression.methods.gptq import GPTQ
from lyapunov_prune.compression.methods.rtn import RoundToNearest
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections

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
    found = bits_kl(llama, budget, Known(llama, ids))
    assert (found.schedule, found.unit, found.budget) == ("bits-kl", "bits", budget)
    assert budget - 4 <= found.mean <= budget * (1 + 1e-12)
    assert {*found.amount} <= {*map(float, WIDTHS)}
    for layer in range(LAYERS):
        assert len({a for a, k in zip(found.amount, found.layers, strict=True) if k == layer}) == 1
    assert len(found.measured_on) == 1
    assert str(Allocation.load(found.save(tmp_path / "allocation.json"))) == str(found)


def test_layers_that_cost_more_get_no_fewer_bits(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    assert (np.diff(bits_kl(llama, 4.0, Known(llama, ids)).by_layer()) >= 0).all()


def test_uniform_bits_are_taken_where_they_cost_less(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    even = evenly(Matrices.of(llama), 4.5, WIDTHS)
    for own, uniform, taken in ((1.0, 2.0, False), (2.0, 1.0, True), (float("nan"), 1.0, True), (1.0, 1.0, True)):
        found = bits_kl(llama, 4.5, Known(llama, ids, (own, uniform)))
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
        bits_kl(llama, 1.5, Known(llama, ids))
    with pytest.raises(LyapunovPruneError, match="nan"):
        bits_kl(llama, float("nan"), Known(llama, ids))
    with pytest.raises(LyapunovPruneError, match=r"NaN .*costs"):
        least_cost(np.array([[1.0, 2.0], [np.nan, 1.0]]), np.array([2, 4]), np.ones(2), 3.0)


def divergence(model: PreTrainedModel, other: PreTrainedModel, ids: torch.Tensor) -> float:
    with torch.no_grad():
        p, q = (m(ids).logits[:, :-1].double().log_softmax(-1) for m in (model, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_cost_is_that_of_a_model_with_one_rounded_layer(family: str, ids: torch.Tensor) -> None:
    model, few = make_tiny(family), ids[:3, :20]
    costs = RoundingCost(read(wrap(model), few), RoundToNearest(), 2)
    before = bits(model)
    found = costs((2, 4, 16))
    assert_same(model, before)
    assert hooks_of(model) == 0
    assert found.shape == (LAYERS, 3)
    assert not found[:, 2].any()
    for layer in (0, 3, 5):
        for column, width in enumerate((2, 4)):
            other = copy.deepcopy(model)
            for p in find_projections(wrap(other)):
                if p.layer == layer:
                    W = p.weight(other)
                    W.data.copy_(RoundToNearest().compress(W, width))
            assert found[layer, column] == pytest.approx(divergence(model, other, few[:2]), rel=1e-3)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_all_together_are_judged_on_windows_that_the_costs_did_not_see(method: str, ids: torch.Tensor) -> None:
    model, few = make_tiny("llama"), ids[:3, :20]
    before = bits(model)
    even = evenly(Matrices.of(model), 4.5, (3, 4, 8, 16))
    dense = evenly(Matrices.of(model), 16, (3, 4, 8, 16))
    found = RoundingCost(read(wrap(model), few), METHODS.make(method), 1).together((even, dense))
    assert_same(model, before)
    assert found[1] == 0
    if method == "rtn":
        small = compress(model, method="rtn", allocation=even).model
        assert found[0] == pytest.approx(divergence(model, small, few[2:]), rel=1e-3)
    assert found[0] > 0
    with pytest.raises(LyapunovPruneError):
        RoundingCost(read(wrap(model), few[:1]), METHODS.make(method), 1)


def test_a_method_that_goes_by_statistics_takes_those_of_the_dense_model(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    found = RoundingCost(read(wrap(model), ids), GPTQ(), 1)((3,))
    half = ids[: (len(ids) + 1) // 2]
    in_order = compress(model, half, method="gptq", bits=3).model
    other = copy.deepcopy(model)
    for p, q in zip(find_projections(wrap(other)), find_projections(wrap(in_order)), strict=True):
        if p.layer == 0:  # of layer 0 nothing before it is compressed
            p.weight(other).data.copy_(q.weight(in_order))
    assert found[0, 0] == pytest.approx(divergence(model, other, half), rel=1e-3)


def test_compress_shares_bits_out_by_it(ids: torch.Tensor) -> None:
    """Nearer to the dense prediction than 4 bits everywhere; 16 leaves a layer as it is."""
    model = make_tiny("llama")
    allocation = bits_kl(model, 4.5, RoundingCost(read(wrap(model), ids), RoundToNearest(), 1))
    done = compress(model, method="rtn", allocation=allocation)
    assert len({*allocation.by_layer()}) > 1
    assert allocation.mean <= 4.5
    assert done.report.saw
    for p in find_projections(wrap(model)):
        width, W = allocation.of(p.name), p.weight(model)
        wanted = W if width == 16 else RoundToNearest().compress(W, width)
        assert torch.equal(p.weight(done.model), wanted), p.name
    even = compress(model, ids, method="rtn", bits=4).model
    assert divergence(model, done.model, ids) < divergence(model, even, ids)
    assert np.isfinite(allocation.parameters["cost"])
