"""Theorem 10 on real trajectories: alignment, gain and κ of every layer against states taken on their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_tiny, states_of
from transformers import PreTrainedModel

from lyapunov_prune.bounds import alignment
from lyapunov_prune.bounds.alignment import LayerAlignment
from lyapunov_prune.bounds.bound_check import BoundCheck, Numbers
from lyapunov_prune.bounds.check import check_bounds, check_written
from lyapunov_prune.bounds.checkers import preln_contraction_sufficient
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections


def growing(rate: float) -> PreTrainedModel:
    """GPT-2 in float64, every layer of which adds `rate` times as much of one vector as the layer before."""
    model = make_tiny("gpt2").double()
    with torch.no_grad():
        for k, layer in enumerate(model.transformer.h):
            layer.mlp.c_proj.bias += 3.0 * rate**k
    return model


def with_another_first_layer(rate: float) -> PreTrainedModel:
    """All later layers are the dense ones: what they make of the error is what its own states show."""
    model = growing(rate)
    with torch.no_grad():
        for p in find_projections(wrap(model)):
            if p.layer == 0:
                p.weight(model).mul_(0.99)
    return model


@pytest.mark.parametrize(("rate", "layers"), [(10.0, [1, 2, 3, 4, 5]), (0.0, [])], ids=["holds", "does not hold"])
def test_the_three_numbers_are_those_of_the_states(rate: float, layers: list[int], ids: torch.Tensor) -> None:
    dense, other = growing(rate), with_another_first_layer(rate)
    report = check_written(dense, other, ids[:2, :20])
    found = report.alignment
    assert found is not None
    clean, moved = (states_of(model, ids[:2, :20]) for model in (dense, other))
    shares = []
    for k in range(6):
        h, s = clean[k], clean[k + 1] - clean[k]
        e, after = moved[k] - clean[k], moved[k + 1] - clean[k + 1]
        assert found.gain[k] == pytest.approx(float(s.norm() / h.norm()), rel=1e-9)
        assert found.align[k] == pytest.approx(float((h * s).sum() / (h.norm() * s.norm())), rel=1e-9)
        assert found.state_growth[k] == pytest.approx(float(clean[k + 1].norm() / h.norm()) ** 2, rel=1e-9)
        if k == 0:
            assert np.isnan(found.kappa[k])
            assert np.isnan(found.share[k])
            continue
        kappa = float((after - e).norm() / e.norm())
        assert found.kappa[k] == pytest.approx(kappa, rel=1e-6)
        assert found.meets[k] == ((1 + kappa) ** 2 < found.state_growth[k])
        growth = (clean[k + 1].norm(dim=-1) / h.norm(dim=-1)) ** 2
        met = (1 + (after - e).norm(dim=-1) / e.norm(dim=-1)) ** 2 < growth
        shares.append(float(met.double().mean()))
        # What the theorem promises where its condition is met.
        rho = (after.norm(dim=-1) / clean[k + 1].norm(dim=-1) / (e.norm(dim=-1) / h.norm(dim=-1))) ** 2
        assert (rho[met] < 1).all()
    assert found.share[1:].tolist() == shares
    assert np.flatnonzero(found.meets).tolist() == layers
    assert [c.layer for c in found.checks] == [k for k in range(1, 6) if shares[k - 1]]
    assert all(c.holds and c.estimate and c.bound < 1 for c in found.checks)
    assert sum(c.inputs for c in found.checks) == round(40 * sum(shares))
    assert f"met by {len(layers)} of the 5 layers that an error reaches" in report.headline()


def test_planted_fault_what_a_layer_makes_of_the_error_is_lost(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """κ = 0 says that the error leaves a layer as it came."""

    def faulty(rho: Numbers, kappa: np.ndarray, *rest: Numbers, **named: Any) -> BoundCheck | None:
        return preln_contraction_sufficient(rho, 0 * kappa, *rest, **named)

    monkeypatch.setattr(alignment, "preln_contraction_sufficient", faulty)
    report = check_written(growing(10.0), with_another_first_layer(10.0), ids[:1, :20])
    assert not report.violations
    assert not report.passed
    assert "preln_contraction_sufficient is VIOLATED by residual stream" in str(report)


def test_it_comes_with_one_setting_and_prints_a_row_a_layer(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    found = check_bounds(llama, ids[:1, :20]).alignment
    assert isinstance(found, LayerAlignment)
    assert len(found.to_frame()) == 6
    assert np.isnan(found.share[0])


def test_windows_add_up(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    one, two = (check_bounds(llama, ids[:2, :20], batch_size=size).alignment for size in (1, 2))
    assert one is not None
    assert two is not None
    np.testing.assert_allclose(one.to_frame().to_numpy(float), two.to_frame().to_numpy(float), rtol=1e-3)


def test_a_layer_that_adds_nothing_is_at_a_right_angle() -> None:
    """The cosine with no vector is none; 0 is taken, as the gain beside it is 0 and any would do."""
    found = alignment._cosine(np.array([0.0, 3.0, 0.0]), np.array([4.0, 9.0, 0.0]), np.array([0.0, 4.0, 0.0]))
    assert found.tolist() == [0, 0.5, 0]


def test_tokens_without_a_state_or_an_error_take_no_part() -> None:
    sums = alignment.AlignmentSums(1)
    h = torch.tensor([[[3.0, 0.0], [0.0, 0.0], [0.0, 2.0], [1.0, 0.0]]]).double()
    e = torch.tensor([[[0.1, 0.0], [0.1, 0.0], [0.0, 0.0], [0.1, 0.0]]]).double()
    out = h + torch.tensor([[[3.0, 0.0], [1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]]).double()  # the last becomes zero
    sums.add(0, (h, h + e), (out, out + e))
    found = sums.result()
    assert found.share.tolist() == [1.0]
    (check,) = found.checks
    assert check.inputs == 1
    assert check.error == pytest.approx(0.25)  # ρ: the error as it was, the state twice as long
    assert found.gain[0] == pytest.approx(np.sqrt((9 + 1 + 4 + 1) / (9 + 4 + 1)))
    assert found.align[0] == pytest.approx((9 + 4 - 1) / np.sqrt(14 * 15))
    assert found.kappa[0] == 0
