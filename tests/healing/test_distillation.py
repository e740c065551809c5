"""The distillation loss against float64 autograd and finite differences; steps that follow from their tensors alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import PartialState
from families.zoo import make_zoo
from helpers import make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.errors import Diverged, LyapunovPruneError
from lyapunov_prune.forward import scoring
from lyapunov_prune.healing import distillation as module
from lyapunov_prune.healing.distillation import Distillation, distillation_loss, rms, update_sizes
from lyapunov_prune.healing.trained import trained


def reference(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> tuple[float, torch.Tensor]:
    """Token by token from the definition, in float64, with autograd's gradient."""
    z = student.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for s, t in zip(z, teacher.double(), strict=True):
        p, q = F.softmax(t / temperature, 0), F.softmax(s / temperature, 0)
        total = total + (p * (p.log() - q.log())).sum()
    loss = temperature**2 * total / len(z)
    loss.backward()
    assert z.grad is not None
    return loss.item(), z.grad


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 150), st.integers(1, 30), st.floats(0.5, 4), st.floats(0.1, 5))
def test_loss_and_gradient_are_those_of_the_definition(
    seed: int, tokens: int, vocabulary: int, temperature: float, scale: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    z, t = (scale * torch.randn(tokens, vocabulary, generator=g) for _ in range(2))
    wanted, slope = reference(z, t, temperature)
    loss, gradient = distillation_loss(z, t.clone(), temperature)
    assert loss == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient, slope.float(), rtol=1e-4, atol=1e-6)


def test_the_gradient_is_that_of_finite_differences() -> None:
    g = torch.Generator().manual_seed(0)
    z, t, direction = (torch.randn(70, 11, generator=g, dtype=torch.float64) for _ in range(3))
    _, gradient = distillation_loss(z, t.clone(), 2.0)
    h = 1e-5
    up, down = (distillation_loss(z + sign * h * direction, t.clone(), 2.0)[0] for sign in (1, -1))
    assert float((gradient * direction).sum()) == pytest.approx((up - down) / (2 * h), rel=1e-7)


def test_the_gradient_takes_the_place_of_the_teachers_logits() -> None:
    z, t = torch.randn(2, 5, 7)
    _, gradient = distillation_loss(z, t)
    assert gradient.data_ptr() == t.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_teacher_of_another_dtype_keeps_its_logits(dtype: torch.dtype) -> None:
    z, t = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    t = t.to(dtype)
    before = t.clone()
    loss, gradient = distillation_loss(z, t)
    assert torch.equal(t, before)
    assert gradient.dtype == z.dtype
    assert loss == pytest.approx(reference(z, t, 1.0)[0], rel=1e-5)


def test_no_loss_where_the_two_agree_whatever_is_added_to_all_logits() -> None:
    t = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    loss, gradient = distillation_loss(t + 5, t.clone())
    assert abs(loss) < 1e-6
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(4, 8), (5, 7), (5,)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LyapunovPruneError, match=r"\(5, 8\)"):
        distillation_loss(torch.zeros(5, 8), torch.zeros(shape))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    with pytest.raises(LyapunovPruneError, match="temperature is"):
        distillation_loss(torch.zeros(5, 8), torch.zeros(5, 8), temperature)


# Steps.


RATE = 3e-3


def distil(**changes: Any) -> Distillation:
    student, teacher = make_tiny("llama", seed=1), make_tiny("llama")
    return Distillation(student, teacher, dict(student.named_parameters()), **{"temperature": 1.0, **changes})


def test_a_step_is_one_of_adam_on_the_clipped_gradient(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    run, twin = distil(temperature=2.0), distil()
    run.take_step(ids[[0]], RATE)
    target = twin.teacher(ids[:1]).logits[0].detach()
    loss = 4 * F.kl_div(
        (twin.model(ids[:1]).logits[0] / 2).log_softmax(-1), (target / 2).softmax(-1), reduction="batchmean"
    )
    loss.backward()
    assert run.losses == [pytest.approx(float(loss), rel=1e-5)]
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in twin.parameters.values() if p.grad is not None))
    assert norm > module.CLIP
    for name, p in twin.parameters.items():
        assert p.grad is not None
        clipped = p.grad.double() / norm
        torch.testing.assert_close(run.parameters[name].grad, clipped.float(), rtol=1e-3, atol=1e-6)
        # Adam's first step: mean and root mean square of one gradient.
        wanted = p.detach().double() - RATE * clipped / (clipped.abs() + 1e-8)
        large = clipped.abs() > 1e-5  # below, the rounding of the gradient shows
        torch.testing.assert_close(run.parameters[name].detach().double()[large], wanted[large], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt", "gpt2"])
def test_logits_of_a_block_after_the_other_teach_the_same(
    name: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2 caps its logits, OPT goes past its backbone, GPT-2 ties its head, whose gradient comes from both ends."""
    runs = [], []
    for found, whole in zip(runs, (2**25, 0), strict=True):
        monkeypatch.setattr(scoring, "_WHOLE", whole)
        monkeypatch.setattr(scoring, "_ENTRIES", 9 * 97)
        student, teacher = (make_tiny(name, seed=seed).double() for seed in (1, 0))
        named = dict(student.named_parameters())
        run = Distillation(student, teacher, named, temperature=2.0)
        rows = list[int]()
        student.get_output_embeddings().register_forward_hook(lambda m, x, z, rows=rows: rows.append(z[..., 0].numel()))
        run.take_step(ids, RATE)
        found += [run.losses, {key: p.grad for key, p in named.items() if p.grad is not None}]
        assert (max(rows) <= 9) == (whole == 0)
    (a, wanted), (b, given) = runs
    assert a == pytest.approx(b, rel=1e-9)
    assert wanted.keys() == given.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(given[key], gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("windows", "passes"), [(0, 9), (1, 7), (3, 3)])
def test_a_window_that_comes_again_teaches_the_same_without_the_teachers_layers(
    windows: int, passes: int, narrow: bool, ids: torch.Tensor
) -> None:
    """Room for the states of so many windows, of three that come three times."""
    alone = PartialState(cpu=True)
    plain, kept = (distil(processes=alone, narrow=narrow) for _ in range(2))
    plain._room = 0
    kept._room = windows * ids[0].numel() * kept.teacher.config.hidden_size * 4
    plain.take_step(ids, RATE), kept.take_step(ids, RATE)  # the check of the heads is behind
    ran: list[torch.Tensor] = []
    kept.teacher.model.layers[0].register_forward_hook(lambda m, x, y: ran.append(x[0]))
    for k in (2, 0, 1, 1, 0, 2):
        for run in (plain, kept):
            run.take_step(ids[[k]], RATE)
    assert len(ran) + len(ids) == passes
    assert kept.losses == plain.losses
    assert all(torch.equal(p, kept.parameters[name]) for name, p in plain.parameters.items())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "opt", "mixtral", "mamba2", "bamba"])
def test_the_gradient_of_products_in_bfloat16_points_where_that_of_float32_does(name: str, ids: torch.Tensor) -> None:
    teacher, found = make_zoo(name), []
    for narrow in (False, True):
        student = make_zoo(name)
        for p in student.parameters():
            p.data *= 1 + 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        run = Distillation(student, teacher, dict(student.named_parameters()), 1.0, narrow=narrow)
        run.take_step(ids, 0.0)
        given = [p.grad for p in run.parameters.values() if p.grad is not None]
        assert {gradient.dtype for gradient in given} == {torch.float32}
        found.append((run.losses[0], torch.cat([gradient.flatten() for gradient in given])))
    (loss, wide), (other, narrowed) = found
    assert other != loss
    assert other == pytest.approx(loss, rel=module.CLOSE)
    assert torch.cosine_similarity(wide, narrowed, 0) > 0.98


def test_products_in_bfloat16_are_for_losses_that_they_change_little(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for two, change, narrow in [
        ((1.0, 1 + 0.9 * module.CLOSE), 0.9 * module.CLOSE, True),
        ((1.0, 1 - 1.1 * module.CLOSE), 1.1 * module.CLOSE, False),
        ((1.0, RuntimeError()), math.inf, False),
        ((1.0, math.nan), math.nan, False),
        ((0.0, 0.0), math.inf, False),
    ]:
        run, losses = distil(), dict(zip((False, True), two, strict=True))

        def learn(part: torch.Tensor, items: int, run: Distillation = run, losses: dict[bool, Any] = losses) -> float:
            if isinstance(losses[run.narrow], Exception):
                raise losses[run.narrow]
            return losses[run.narrow]

        monkeypatch.setattr(run, "_learn", learn)
        run.narrow_if_close(ids[:1])
        assert (run.change, run.narrow) == (pytest.approx(change, nan_ok=True), narrow)


def test_the_same_tokens_cut_into_other_windows_are_others(ids: torch.Tensor) -> None:
    run, fresh = distil(), distil()
    for windows in (ids[:2], ids[:2].reshape(1, -1)):
        run.take_step(windows, 0.0)
    fresh.take_step(ids[:2].reshape(1, -1), 0.0)
    assert run.losses[1] == pytest.approx(fresh.losses[0], rel=1e-6)
    assert run.losses[1] != pytest.approx(run.losses[0], rel=1e-6)


def test_windows_one_by_one_are_one_step_on_all_of_them(ids: torch.Tensor) -> None:
    together, apart = distil(), distil(processes=PartialState(cpu=True))
    for run in (together, apart):
        for model in (run.model, run.teacher):
            model.double()
    sizes: list[int] = []
    apart.model.model.layers[0].register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    apart.take_step(ids, 0.0)  # the check of the head is behind
    together.take_step(ids, 0.0)
    sizes.clear()
    for _ in range(3):
        together.take_step(ids, RATE)
        apart.take_step(ids, RATE)
    assert sizes == [1] * 9
    np.testing.assert_allclose(apart.losses, together.losses, rtol=1e-12)
    for name, p in together.parameters.items():
        torch.testing.assert_close(apart.parameters[name], p, rtol=0, atol=1e-9)


def test_the_teacher_runs_without_gradient_and_stays_as_it_was(ids: torch.Tensor) -> None:
    run = distil()
    before = {name: p.clone() for name, p in run.teacher.named_parameters()}
    seen: list[bool] = []
    run.teacher.lm_head.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    for row in ids:
        run.take_step(row[None], RATE)
    assert len(seen) >= len(ids)
    assert not any(seen)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in run.teacher.named_parameters())


def test_the_loss_falls(ids: torch.Tensor) -> None:
    run = distil()
    for _ in range(20):
        run.take_step(ids[[0]], RATE)
    assert run.losses[-1] < 0.5 * run.losses[0]


def test_a_run_goes_on_from_its_tensors_bit_for_bit(ids: torch.Tensor) -> None:
    whole, first, second = distil(), distil(), distil()
    for step in range(8):
        whole.take_step(ids[[step % 3]], RATE)
    for step in range(5):
        first.take_step(ids[[step % 3]], RATE)
    second.go_on_from((name, t.clone()) for name, t in first.tensors().items())
    for step in range(5, 8):
        second.take_step(ids[[step % 3]], RATE)
    assert second.losses == whole.losses
    assert all(torch.equal(t, second.tensors()[name]) for name, t in whole.tensors().items())


def test_a_parameter_takes_the_rate_times_its_size(ids: torch.Tensor) -> None:
    names = list(distil().parameters)
    sizes = {name: 2.0 ** (i % 4) for i, name in enumerate(names)}
    plain, sized = distil(), distil(sizes=sizes)
    start = plain.copies()
    for run in (plain, sized):
        run.take_step(ids[[0]], RATE)
    for name in names:
        wanted, found = (run.parameters[name].detach() - start[name] for run in (plain, sized))
        torch.testing.assert_close(found, sizes[name] * wanted, rtol=0, atol=1e-5)


def test_a_run_begun_anew_is_a_new_one_with_the_losses_of_the_old(ids: torch.Tensor) -> None:
    run, fresh = distil(), distil()
    start = run.copies()
    for step in range(4):
        run.take_step(ids[[step % 3]], RATE)
    assert not all(torch.equal(p, start[name]) for name, p in run.parameters.items())
    run.begin_anew(start)
    assert all(torch.equal(p, start[name]) for name, p in run.parameters.items())
    for step in range(3):
        for other in (run, fresh):
            other.take_step(ids[[step % 3]], RATE / 2)
    assert run.step == 7
    assert run.losses[4:] == fresh.losses
    assert all(torch.equal(p, fresh.parameters[name]) for name, p in run.parameters.items())


def test_a_loss_that_is_not_finite_ends_the_run_at_its_step(ids: torch.Tensor) -> None:
    run = distil()
    run.take_step(ids[[0]], RATE)
    before = {name: p.clone() for name, p in run.parameters.items()}
    head = run.model.get_output_embeddings().weight
    head.data[3] = math.inf
    with pytest.raises(Diverged, match="loss of step 1"):
        run.take_step(ids[[1]], RATE)
    assert all(torch.equal(p, before[name]) for name, p in run.parameters.items() if p is not head)
    assert run.step == 1
    broken = distil()
    broken.teacher.get_output_embeddings().weight.data[3] = math.nan
    with pytest.raises(Diverged, match="loss of step 0"):
        broken.take_step(ids[[0]], RATE)


def by_definition(W: torch.Tensor) -> float:
    return float(np.sqrt(np.mean(np.square(W.detach().double().numpy()))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_size_is_the_root_mean_square(dtype: torch.dtype) -> None:
    W = (1e3 * torch.randn(57, 31, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert rms(W) == pytest.approx(by_definition(W), rel=1e-6)
    assert rms(torch.zeros(3)) == 0


def test_parameters_of_layers_have_their_own_size_and_zeros_the_least_of_the_others() -> None:
    model = make_tiny("gpt2")
    layers = model.transformer.h
    layers[0].ln_1.bias.data.zero_()
    with trained(model, None, 0) as parameters:
        sizes = update_sizes(model, parameters)
    assert sizes.keys() == parameters.keys()
    zero = "0.ln_1.bias"
    for name, p in parameters.items():
        if name != zero:
            assert sizes[name] == pytest.approx(by_definition(p), rel=1e-5)
    assert sizes[zero] == min(size for name, size in sizes.items() if name != zero)


def test_where_all_is_zero_a_rate_is_absolute() -> None:
    model = make_tiny("llama")
    for p in model.parameters():
        p.data.zero_()
    with trained(model, None, 0) as parameters:
        assert set(update_sizes(model, parameters).values()) == {1.0}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_factors_are_sized_by_the_matrix_that_they_update(family: str) -> None:
    """GPT-2 keeps its matrices transposed."""
    model, rank = make_tiny(family), 3
    with trained(model, rank, 0) as factors:
        sizes = update_sizes(model, factors)
        for name, factor in factors.items():
            module, _, side = name.rpartition(".")
            n = factors[f"{module}.A"].shape[1]
            if side == "A":
                assert sizes[name] == pytest.approx(by_definition(factor), rel=1e-5)
            else:
                W = model.get_submodule(module).weight
                assert sizes[name] == pytest.approx(by_definition(W) * (n / rank) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("rate", [1e-3, 1e-2])
@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_moves_every_matrix_by_about_the_rate_times_its_size(
    family: str, rank: int | None, rate: float, ids: torch.Tensor
) -> None:
    """Adam's first step is one of ±rate where the gradient is larger than rounding."""
    model, teacher = make_tiny(family, seed=1), make_tiny(family)
    for i, p in enumerate(model.parameters()):  # of sizes that differ
        p.data *= 2 ** (i % 3 - 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with trained(model, rank, 0) as parameters:
        run = Distillation(model, teacher, parameters, 1.0, sizes=update_sizes(model, parameters))
        run.take_step(ids, rate)
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters() if p.ndim == 2}
    moved = {name: change for name, change in moved.items() if ".layers." in name or ".h." in name}
    assert moved
    for name, change in moved.items():
        assert by_definition(change) == pytest.approx(rate * by_definition(before[name]), rel=0.3), name
