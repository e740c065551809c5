"""Sums over what goes through feed-forward blocks, against numpy on what the model computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import hooks_of, inputs_of, make_tiny

from lyapunov_prune.calibration.blocks import SUMS, Passed, sum_blocks, watched_blocks
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.feedforward import find_feedforward
from lyapunov_prune.models.structure import find_structure

IDS = torch.randint(3, 97, (4, 12), generator=torch.Generator().manual_seed(3))
PLAIN = ("input", "hidden", "input_input", "hidden_input")


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "opt"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_sum_is_its_definition(name: str, batch_size: int) -> None:
    model = make_tiny(name)
    structure = find_structure(model)
    blocks = [find_feedforward(structure, layer) for layer in (1, 4)]
    needs = tuple(SUMS) if blocks[0].gated else PLAIN

    def run() -> None:
        for ids in IDS.split(batch_size):
            model(ids)

    for block, found in zip(blocks, sum_blocks(structure.layers, blocks, needs, run), strict=True):
        layer = structure.layers[block.layer]
        inputs = inputs_of(model, IDS)
        x, h = (inputs[f"{structure.layers_path}.{block.layer}.{p.module}"].numpy() for p in (block.up, block.out))
        parts = block.parts(layer)
        expected = {"input": x.sum(0), "hidden": h.sum(0), "input_input": x.T @ x, "hidden_input": h.T @ x}
        if parts.gate is not None:
            z, u = (torch.nn.functional.linear(torch.from_numpy(x).float(), *pair) for pair in (parts.gate, parts.up))
            g, u = parts.activation(z).double().numpy(), u.double().numpy()
            expected |= {"gate": g.sum(0), "gate_up_up": (g * u**2).sum(0), "up_up": (u**2).sum(0)}
            np.testing.assert_allclose(g * u, h, rtol=1e-4, atol=1e-5)
        assert found.tokens == IDS.numel()
        assert expected.keys() == set(needs)
        for key, value in expected.items():
            assert found[key].dtype == torch.float64
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-4)
    assert hooks_of(model) == 0


def test_what_passes_is_what_the_model_computes() -> None:
    model = make_tiny("phi3").to(torch.bfloat16)
    structure = find_structure(model)
    block = find_feedforward(structure, 2)
    seen: list[Passed] = []
    with watched_blocks(structure.layers, [block], lambda _, passed: seen.append(passed)):
        model(IDS)
    (passed,) = seen
    assert passed.gate is not None
    assert passed.up is not None
    assert passed.hidden.dtype == torch.bfloat16
    assert torch.equal(passed.up * passed.gate, passed.hidden)
    assert passed.x.shape == (IDS.numel(), 32)


def test_hooks_go_when_a_forward_fails() -> None:
    model = make_tiny("llama")
    structure = find_structure(model)
    block = find_feedforward(structure, 2)
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(LyapunovPruneError, match=r"NaN.*feed-forward.*layer 2"):
        sum_blocks(structure.layers, [block], ["gate"], lambda: model(IDS))
    assert hooks_of(model) == 0
    with pytest.raises(LyapunovPruneError, match="layer 2 took no part"):
        sum_blocks(structure.layers, [block], ["gate"], lambda: None)
