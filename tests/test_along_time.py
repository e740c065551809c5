"""ρ along time of the small hybrid's layers, against the recurrence rolled in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from helpers import hooks_of
from torch.nn.functional import softplus

import lyapunov_prune as lp
from experiments import along_time as measured
from experiments.along_time import AlongTime, along_time
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.propagation import direction

IDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
STEPS, SEEDS = 12, (0, 3)


def inputs_of(model: Any) -> list[torch.Tensor]:
    """What enters every layer when the whole text is read at once."""
    entered: list[torch.Tensor] = []
    layers = find_structure(model).layers
    with hooked(before=[(layer, lambda module, args, kwargs: entered.append(args[0])) for layer in layers]):
        model(IDS, use_cache=False)
    return entered


@torch.no_grad()
def test_agrees_with_the_recurrence_rolled_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_zoo("granitemoehybrid")
    found = along_time(lp.wrap(model), torch.as_tensor(IDS), seeds=SEEDS)  # type: ignore[arg-type]
    assert found.layers == (0, 1, 3, 4, 6)
    assert hooks_of(model) == 0
    left, bound = np.ones((2, len(found.layers), STEPS + 1))
    entered = inputs_of(model)
    for at, index in enumerate(found.layers):
        layer = find_structure(model).layers[index]
        mixer: Any = layer.mamba
        step = softplus(mixer.in_proj(layer.input_layernorm(entered[index]))[..., -mixer.num_heads :] + mixer.dt_bias)
        products = torch.exp(-step * mixer.A_log.exp())[:, -STEPS:, :, None, None].double().cumprod(1)
        shape = (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
        flat = torch.ones(1, int(np.prod(shape)))
        errors = torch.stack(
            [torch.cat([direction(flat, window, seed) for window in (0, 1)]).view(2, *shape) for seed in SEEDS]
        ).double()
        bound[at, 1:] = products.flatten(2).amax((0, 2))
        kept = (products * errors.unsqueeze(2)).flatten(3).square().sum(-1)
        left[at, 1:] = (kept / errors.flatten(2).square().sum(-1, keepdim=True)).mean((0, 1)).sqrt()
    np.testing.assert_allclose(found.left, left, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.bound, bound, rtol=1e-3, atol=1e-5)
    assert (found.left <= found.bound).all()
    # Planted faults: layers that see what the others' errors became, and a recurrence of another form.
    monkeypatch.setattr(measured, "_hold", lambda module, args, kwargs: None)
    with pytest.raises(lp.LyapunovPruneError, match="another recurrence"):
        along_time(lp.wrap(model), torch.as_tensor(IDS), seeds=SEEDS, epsilon=0.5)  # type: ignore[arg-type]


def test_rates_and_half_lives_of_known_curves() -> None:
    k = np.arange(65)
    left = np.stack([0.9**k, np.maximum(0.5**k, 1e-4), np.where(k > 0, 0.8, 1.0)])
    floor = np.zeros((3, 65))
    floor[1, 1:] = 1e-4  # 0.5^9 is above ten times the floor, 0.5^10 is not
    found = AlongTime((0, 1, 2), left, np.stack([left, left], -1), floor, left)
    assert found.rho == pytest.approx([0.9, 0.5, 0.8 ** (1 / 64)])
    np.testing.assert_array_equal(found.rho_interval[:, 0], found.rho)
    assert found.half_life == pytest.approx([np.log(0.5) / np.log(0.9), 1, np.inf])
