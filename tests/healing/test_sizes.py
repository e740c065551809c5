"""The sizes that learning rates are shares of, against their definition, and what a step at a rate does to a matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import make_tiny

from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.sizes import rms, update_sizes
from lyapunov_prune.healing.trained import trained


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
