"""check_bounds and check_grid: zero violations where nothing is wrong, each planted fault named."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from helpers import make_tiny, operated
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from lyapunov_prune import linalg as norms
from lyapunov_prune.bounds import check as checks
from lyapunov_prune.bounds.approximation import Approximation, approximation
from lyapunov_prune.bounds.check import check_bounds, check_grid, check_written
from lyapunov_prune.bounds.report import BoundsReport
from lyapunov_prune.bounds.trajectory import Trajectory
from lyapunov_prune.compression.methods.magnitude import Magnitude
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import certify
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.plain import find_projections


@pytest.fixture
def few(ids: torch.Tensor) -> torch.Tensor:
    return ids[:2, :20]


def test_every_family_has_no_violation_and_is_left_alone(family: str, few: torch.Tensor) -> None:
    model = make_tiny(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    dense = model(few).logits
    for options in ({}, {"sparsity": 0.02, "rank": 4, "cache_radius": 0.6}):
        report = check_bounds(model, few, **options)
        assert report.passed, str(report)
        assert report.checks == len(find_projections(wrap(model)))
        assert report.inputs == report.checks * few.numel()
        assert (report.attained > 0.9999).all()
        assert (report.ratio > 0).all()
        assert (report.ratio < 1).all()
        assert len(report.composition) == 6
        assert all(c.holds and c.estimate for c in report.composition)
        assert report.decisions is not None
        assert len(report.decisions.radius) == few.numel()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(model(few).logits, dense)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_weights_that_a_first_forward_divides_are_divided_before(few: torch.Tensor) -> None:
    """RWKV's, from layer 6 on: in place, and so of whatever matrix stands there."""
    fresh = [make_zoo("rwkv") for _ in range(3)]
    with torch.no_grad():
        wanted = fresh[0](few, use_cache=False).logits
        first, second = (check_bounds(fresh[1], few, sparsity=0.3).composition for _ in range(2))
        check_grid(fresh[2], few, sparsities=[0.3], ranks=[None], cache_radii=[0.0])
        for model in fresh:
            torch.testing.assert_close(model(few, use_cache=False).logits, wanted, rtol=0, atol=0)
    assert [c.error for c in first] == [c.error for c in second]
    small = make_zoo("rwkv")
    name = find_projections(wrap(small))[-1].name
    with torch.no_grad():
        next(p for p in find_projections(wrap(small)) if p.name == name).weight(small).mul_(0.5)
    assert [c.error > 0 for c in check_written(make_zoo("rwkv"), small, few).composition] == [False] * 7 + [True]


@pytest.mark.parametrize(
    ("options", "theorem"),
    [
        ({"sparsity": 0.5}, "sparse_activation_bound"),
        ({"sparsity": 0.0, "rank": 4}, "interpolation_bound"),
        ({"sparsity": 0.0, "cache_radius": 0.6}, "retrieval_bound"),
        ({"sparsity": 0.5, "rank": 4}, "composition_bound"),
        ({"sparsity": 0.5, "rank": 4, "cache_radius": 0.6}, "composition_bound"),
    ],
)
def test_each_setting_is_held_against_its_theorem(options: dict[str, Any], theorem: str, few: torch.Tensor) -> None:
    report = check_bounds(make_tiny("llama"), few, **options)
    assert report.theorems == (theorem,)
    assert (report.hits > 0) == ("cache_radius" in options)


def test_the_approximated_trajectory_is_followed_to_the_prediction(few: torch.Tensor) -> None:
    """Errors and movements are those of two separate models, one with the weights overwritten."""
    model, twin = make_tiny("llama"), make_tiny("llama")
    with torch.no_grad():
        for p in find_projections(wrap(twin)):
            p.weight(twin).copy_(Magnitude().compress(p.weight(model), 0.1))
        dense = model(few, output_hidden_states=True)
        changed = twin(few, output_hidden_states=True)
    report = check_bounds(model, few, sparsity=0.1)
    for check, h, h2 in zip(report.composition, dense.hidden_states[1:-1], changed.hidden_states[1:-1], strict=False):
        assert check.error == pytest.approx(float((h - h2).norm()), rel=1e-3)
    assert report.decisions is not None
    flips = (dense.logits.argmax(-1) != changed.logits.argmax(-1)).double().flatten().numpy()
    np.testing.assert_array_equal(report.decisions.changed, flips)
    assert 0 < report.decisions.certified.sum() < few.numel()


def growing() -> PreTrainedModel:
    """Every layer adds twice as much of one vector as the layer before."""
    model = make_tiny("gpt2")
    with torch.no_grad():
        for k, layer in enumerate(model.transformer.h):
            layer.mlp.c_proj.bias += 3.0 * 2**k
    return model


def test_the_contraction_theorems_speak_of_the_relative_errors(few: torch.Tensor) -> None:
    """A state that grows by a constant outgrows every error: Theorems 8 and 9 meet their hypotheses."""
    model = growing()
    report = check_bounds(model, few, sparsity=0.02)
    states = []
    for sparsity in (0.0, 0.02):
        twin = make_tiny("gpt2")
        twin.load_state_dict(model.state_dict())
        with torch.no_grad():
            for p in find_projections(wrap(twin)):
                p.weight(twin).copy_(Magnitude().compress(p.weight(model), sparsity))
            states.append(twin(few, output_hidden_states=True).hidden_states[:-1])
    relative = [float((h - h2).norm() / h.norm()) for h, h2 in zip(*states, strict=True)]
    *growth, geometric = report.contraction
    assert report.passed
    assert report.gamma < 1
    assert geometric.theorem == "lyapunov_contraction_bound"
    assert geometric.error < geometric.bound < 1
    assert [c.theorem for c in growth] == ["residual_growth_contraction"] * len(growth)
    assert growth
    for check in growth:
        assert check.layer is not None
        assert check.estimate
        if check.layer + 1 < len(relative):
            assert check.error == pytest.approx(relative[check.layer + 1] ** 2, rel=1e-3)
            assert relative[check.layer + 1] < relative[check.layer]
        assert check.error <= check.bound
    assert "geometric estimate" in report.headline()


def test_two_phases_stand_beside_one(few: torch.Tensor) -> None:
    report = check_bounds(make_tiny("llama"), few, sparsity=0.5)
    assert report.phases is not None
    assert report.phases.error <= report.phases.bound <= report.phases.one_phase
    assert report.phases.line() in report.headline()
    assert check_bounds(make_tiny("llama", num_hidden_layers=1), few).phases is None


def test_a_hypothesis_that_is_not_met_is_told(few: torch.Tensor) -> None:
    report = check_bounds(make_tiny("llama"), few)
    assert report.gamma >= 1
    assert all(c.theorem == "residual_growth_contraction" for c in report.contraction)
    assert "not below one" in report.headline()
    nothing = check_bounds(make_tiny("llama"), few, sparsity=0.0)
    assert nothing.gamma == 0
    assert nothing.passed


@pytest.mark.parametrize("lost", ["local", "stretched"])
def test_planted_fault_in_the_trajectory_breaks_the_contraction(
    lost: str, few: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer adds, or what it stretches, is measured at a tenth."""
    follow = Trajectory.follow

    def faulty(self: Trajectory, ids: torch.Tensor) -> None:
        follow(self, ids)
        setattr(self, lost, getattr(self, lost) / 100)

    monkeypatch.setattr(Trajectory, "follow", faulty)
    report = check_bounds(growing(), few[:1], sparsity=0.1)
    assert not report.passed
    assert any(" is VIOLATED by " in line for line in report.answer())
    assert "residual_growth_contraction is VIOLATED by layer" in report.headline()
    assert lost == "local" or "lyapunov_contraction_bound is VIOLATED by residual stream" in report.headline()


def test_the_grid_holds_every_theorem(few: torch.Tensor) -> None:
    model = make_tiny("llama")
    report = check_grid(model, few, sparsities=(0.0, 0.5), ranks=(None, 6), cache_radii=(0.0, 0.6))
    assert report.passed, str(report)
    assert report.checks == 8 * len(report.names)
    assert set(report.theorems) == {
        "sparse_activation_bound",
        "retrieval_bound",
        "interpolation_bound",
        "composition_bound",
    }
    assert (report.ratio[0] == 0).all()  # the setting that changes nothing
    assert report.hits > 0


def test_grid_and_single_setting_agree(few: torch.Tensor) -> None:
    model = make_tiny("gpt2")
    grid = check_grid(model, few, sparsities=(0.5,), ranks=(None, 6), cache_radii=(0.0, 0.6))
    for row, setting in zip(grid.ratio, grid.settings, strict=True):
        one = check_bounds(model, few, sparsity=0.5, rank=setting.rank, cache_radius=setting.cache_radius)
        np.testing.assert_allclose(row, one.ratio[0], rtol=1e-6)


def test_settings_that_print_alike_are_two(few: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = make_tiny("llama"), []
    outcome = checks._outcome
    monkeypatch.setattr(checks, "_outcome", lambda *given: (taken.append(1), outcome(*given))[1])
    for sparsities, radii in (((0.5,), (0.1,)), ((0.5, 0.50000001), (0.1, 0.1000000001))):
        check_grid(model, few[:1], sparsities=sparsities, ranks=(None,), cache_radii=radii, folder=tmp_path)
    assert len(taken) == 4


def test_the_default_grid_has_thirty_settings(few: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    certify = norms.certify
    monkeypatch.setattr(checks, "certify", lambda W: (taken.append(1), certify(W))[1])
    report = check_grid(make_tiny("opt"), few[:1])
    assert len(report.settings) == 30
    assert report.checks == 30 * 36
    assert report.passed
    assert len(taken) == 36  # ‖W‖ once for each matrix


Fault = Callable[[torch.Tensor, Approximation], Approximation]


def scaled_residual(W: torch.Tensor, found: Approximation) -> Approximation:
    return replace(found, weight=W - 1.01 * (W - found.weight))


def norm_from_below(W: torch.Tensor, found: Approximation) -> Approximation:
    below = 0.9 * norms.certify(W.double() - found.weight.double()).estimate
    return replace(found, sparse_norm=below, total_norm=below)


FAULTS: dict[str, Fault] = {"residual scaled by 1.01": scaled_residual, "norm estimated from below": norm_from_below}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault, guilty: torch.Tensor) -> None:
    """`fault` is done to the approximations of one matrix, which is known by where it lies."""

    def faulty(W: torch.Tensor, W_hat: torch.Tensor, **options: Any) -> Approximation:
        found = approximation(W, W_hat, **options)
        return fault(W, found) if W.data_ptr() == guilty.data_ptr() else found

    monkeypatch.setattr(checks, "approximation", faulty)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_planted_fault_is_caught_and_named(
    name: str, fault: str, few: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny(name)
    projection = find_projections(wrap(model))[11]
    guilty = projection.name
    plant(monkeypatch, FAULTS[fault], projection.weight(model))
    report = check_bounds(model, few)
    assert not report.passed
    assert {v.check.matrix for v in report.violations} == {guilty}
    assert f"VIOLATED by {guilty}" in str(report)
    assert report.to_frame().set_index("matrix")["violations"].to_dict()[guilty] >= 1

    report = check_grid(model, few, sparsities=(0.5,), ranks=(None,), cache_radii=(0.0, 0.5))
    assert {v.check.matrix for v in report.violations} == {guilty}
    assert {v.setting.cache_radius for v in report.violations} == {0.0, 0.5}


def test_planted_fault_a_certified_token_that_changed_is_seen(few: torch.Tensor) -> None:
    report = check_bounds(make_tiny("llama"), few)
    assert report.decisions is not None
    assert report.decisions.changed.any()
    lied = replace(report, decisions=replace(report.decisions, radius=report.decisions.radius + 1e6))
    assert not lied.passed


def test_report_saves_loads_and_prints(few: torch.Tensor, tmp_path: Path) -> None:
    report = check_bounds(make_tiny("gpt2"), few, rank=4, cache_radius=0.3)
    again = BoundsReport.load(report.save(tmp_path / "bounds.json"))
    assert str(again) == str(report)
    assert again.settings == report.settings
    assert again.passed
    assert (again.contraction, again.gamma) == (report.contraction, report.gamma)
    assert len(again.to_frame()) == 90
    assert "attn.c_attn.q" in str(report)
    assert "no worst case" in report.headline()  # the estimate is labelled as one


def test_a_projection_that_never_ran_is_not_called_checked(few: torch.Tensor) -> None:
    model = make_tiny("llama")
    model.model.layers[2].extra = torch.nn.Linear(4, 4)
    report = check_bounds(model, few)
    assert report.unseen == ("model.layers.2.extra",)
    assert "1 matrices, model.layers.2.extra the first" in report.headline()
    assert not check_bounds(make_tiny("llama"), few).unseen


def test_bad_settings_are_refused(few: torch.Tensor) -> None:
    model = make_tiny("llama")
    for options in ({"sparsity": 1.5}, {"rank": 0}, {"cache_radius": -1.0}, {"cache_radius": 1.0}):
        with pytest.raises(LyapunovPruneError):
            check_bounds(model, few, **options)
    with pytest.raises(LyapunovPruneError, match="sparsities is"):
        check_grid(model, few, sparsities=())


# Real sizes.


def train_gpt2(steps: int = 40) -> tuple[PreTrainedModel, torch.Tensor, float, float]:
    """A byte-level GPT-2 trained on the built-in text from nothing; with its first and last loss."""
    from lyapunov_prune.data.text import _builtin

    data = torch.tensor(list(_builtin().encode()), dtype=torch.int64)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for _ in range(steps):
        starts = torch.randint(len(data) - 128, (8,), generator=generator)
        ids = torch.stack([data[s : s + 128] for s in starts.tolist()])
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.eval(), data[:256].view(2, 128), losses[0], losses[-1]


def repeating(model: Any, count: int) -> Any:
    """The GPT-2 whose layers hold the weights of its first `count` ones again and again, in the same memory."""
    layers = model.transformer.h
    for k, layer in enumerate(layers):
        for module, first in zip(layer.modules(), layers[k % count].modules(), strict=True):
            module._parameters.update(first._parameters)
    return model


def test_layers_that_share_weights_share_their_norms(few: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are checked on what each of them is given."""
    shared, apart, certified = repeating(make_tiny("gpt2"), 2), repeating(make_tiny("gpt2"), 2), []
    for layer in apart.transformer.h:
        for module in layer.modules():
            copies = {
                name: torch.nn.Parameter(p.detach().clone()) for name, p in module.named_parameters(recurse=False)
            }
            module._parameters.update(copies)
    monkeypatch.setattr(checks, "certify", lambda W: (certified.append(W), certify(W))[1])
    grid: dict[str, Any] = {"sparsities": [0.3], "ranks": [None, 4], "cache_radii": [0.0, 0.1]}
    reports = [check_grid(model, few, **grid) for model in (shared, apart)]
    assert len(certified) == (2 + 6) * len(reports[0].names) / 6
    np.testing.assert_array_equal(*(report.ratio for report in reports))
    assert len(np.unique(reports[0].ratio[0])) == len(reports[0].names)


@pytest.mark.slow
def test_gpt2_trained_from_nothing() -> None:
    model, ids, first, last = train_gpt2()
    assert last < 0.7 * first
    report = check_grid(model, ids)
    assert report.checks == 30 * 2 * (3 * 4 + 3)
    assert report.passed, str(report)
    assert report.hits > 0  # bytes repeat, and a cache finds them
    light = check_bounds(model, ids, sparsity=0.05)
    assert light.passed
    assert light.decisions is not None
    assert light.decisions.certified.any()  # a trained model has margins, and some survive


@pytest.mark.slow
@pytest.mark.parametrize("real", [False, True], ids=["random weights", "real weights"])
def test_gpt2_small_468_matrices_by_30_settings(real: bool) -> None:
    """14,040 checks, no violation.

    The random model has the heads of GPT-2 small at an eighth of its width, and four of its twelve layers, which
    repeat the weights of the first, whose norms are shared.
    """
    if real:
        folder = os.environ.get("LYAPUNOV_PRUNE_GPT2")
        try:
            model: Any = GPT2LMHeadModel.from_pretrained(folder or "gpt2", local_files_only=True).eval()
        except OSError:
            pytest.skip("gpt2 is not in the hub cache and LYAPUNOV_PRUNE_GPT2 names no folder with it")
    else:
        torch.manual_seed(0)
        model = repeating(GPT2LMHeadModel(GPT2Config(n_embd=96, n_layer=4, vocab_size=500)).eval(), 1)
    tokens = 64 if real else 16  # random weights are as near to a bound on few
    ids = torch.randint(500, (1, tokens), generator=torch.Generator().manual_seed(0))
    report = check_grid(model, ids)
    assert len(report.names) == model.config.n_layer * 39
    assert report.checks == 30 * len(report.names)
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_the_builtin_model(smollm2: Decoder, english: TokenBatch) -> None:
    """Its first and last layers, and those between which its sink arises."""
    kept = (0, 1, 10, 11, 12, 29)
    some = operated(smollm2.model, [layer for layer in range(30) if layer not in kept])
    report = check_bounds(some, replace(english, ids=english.ids[:1, :64]), sparsity=0.2, cache_radius=0.1)
    assert report.passed, str(report)
    assert report.checks == 7 * len(kept)
    assert (report.attained > 0.999).all()
