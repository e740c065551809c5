"""Matrices that a family stacks in one parameter: against float64 references computed by hand, without the stack."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families.zoo import make_zoo
from helpers import hooks_of
from torch import nn

from lyapunov_prune import check_bounds, compress
from lyapunov_prune.bounds.approximate import approximate
from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.healing.low_rank import low_rank_updates
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import find_layers

LAYER = 1
Inputs = dict[str, torch.Tensor]


def text() -> torch.Tensor:
    return torch.randint(3, 90, (3, 24), generator=torch.Generator().manual_seed(0))


def in_double(name: str) -> Any:
    model: Any = make_zoo(name).double()
    model.set_experts_implementation("eager")  # torch has no grouped product of float64
    return model


def entering(model: Any, module: str, run: Callable[[Any, tuple[Any, ...]], Inputs]) -> Inputs:
    """What `run` makes of the arguments of a module, over all windows."""
    found: dict[str, list[torch.Tensor]] = {}

    def note(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, rows in run(m, args or (kwargs["hidden_states"],)).items():
            found.setdefault(name, []).append(rows)

    handle = model.get_submodule(module).register_forward_pre_hook(note, with_kwargs=True)
    for window in text().split(1):
        model(window, use_cache=False)
    handle.remove()
    return {name: torch.cat(rows) for name, rows in found.items()}


def dbrx(m: Any, args: tuple[Any, ...]) -> Inputs:
    """Each token that the router sends to an expert, times the router's weight, in a plain loop."""
    tokens, chosen, weights = args
    rows: dict[str, list[torch.Tensor]] = {}
    for x, experts, ws in zip(tokens.reshape(-1, tokens.shape[-1]), chosen, weights, strict=True):
        for e, w in zip(experts.tolist(), ws, strict=True):
            size = m.ffn_hidden_size
            w1, v1 = (W[e * size : (e + 1) * size] for W in (m.mlp.w1, m.mlp.v1))
            hidden = nn.functional.silu(w1 @ x) * (v1 @ x)
            for name, row in ((f"w1:{e}", x), (f"v1:{e}", x), (f"w2:{e}", hidden)):
                rows.setdefault(name, []).append(w * row)
    return {name: torch.stack(r) for name, r in rows.items()}


def recurrent_gemma(m: Any, args: tuple[Any, ...]) -> Inputs:
    blocks = args[0][0].chunk(m.num_attention_heads, dim=-1)
    return {f"{gate}_gate_weight:{h}": x for gate in ("input", "recurrent") for h, x in enumerate(blocks)}


def zamba(m: Any, args: tuple[Any, ...]) -> Inputs:
    """What enters the convolution of each head is every other block of `in_proj`, then by head."""
    projected = m.in_proj(args[0])[0].T  # features × tokens
    inner, count = m.intermediate_size, projected.shape[1]
    x = projected.reshape(m.intermediate_size, 2, count)[:, 0]
    padded = nn.functional.pad(x, (m.conv_kernel_size - 1, 0))
    y = torch.stack(
        [
            sum(m.conv1d.weight[c, 0, k] * padded[c, k : k + count] for k in range(m.conv_kernel_size))
            for c in range(inner)
        ]
    )
    y = m.act(y + m.conv1d.bias[:, None])
    found = {}
    for h, head in enumerate(y.chunk(m.n_mamba_heads)):
        found[f"x_proj_weight:{h}"] = head.T
        found[f"dt_proj_weight:{h}"] = (m.x_proj_weight[h] @ head)[: m.time_step_rank].T
    return found


# Family, module whose arguments are taken, the reference.
CASES: dict[str, tuple[str, Callable[[Any, tuple[Any, ...]], Inputs]]] = {
    "dbrx": (f"transformer.blocks.{LAYER}.ffn.experts", dbrx),
    "recurrent_gemma": (f"model.layers.{LAYER}.temporal_block.rg_lru", recurrent_gemma),
    "zamba": (f"model.layers.{LAYER}.mamba", zamba),
}


def stacked(model: Any) -> list[Projection]:
    return [p for p in find_projections(wrap(model)) if p.layer == LAYER and p.stack]


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_inputs_by_hand(name: str) -> None:
    model = in_double(name)
    with torch.no_grad():
        inputs = entering(model, *CASES[name])
    found: dict[str, Statistics] = {}
    here = stacked(model)
    stream(model, text(), here, "sensitivity", lambda _, s: found.update(s))
    assert hooks_of(model) == 0
    assert {p.name.rpartition(".")[2] for p in here} >= set(inputs)
    norms = input_norms(model, text(), here)
    tried = 0
    for p in here:
        rows = inputs.get(p.name.rpartition(".")[2])
        if rows is None or (p.expert is not None and len(rows) < p.weight(model).shape[1]):
            continue  # an expert with too few tokens is lent others
        tried += 1
        torch.testing.assert_close(found[p.name].gram, rows.T @ rows, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(norms[p.name], rows.norm(dim=0), rtol=1e-5, atol=1e-7)
        S = found[p.name].sensitivity
        assert S is not None
        assert S.shape == (len(p.weight(model)),) * 2
        assert S.trace() > 0
    assert tried >= len(here) // 2


@pytest.mark.parametrize("name", ["dbrx", "recurrent_gemma"])  # Zamba's layers share matrices, which compress refuses
def test_compressed_by_the_statistics_of_its_inputs(name: str) -> None:
    model = in_double(name)
    small = compress(model, text(), method="wanda", sparsity=0.5).model
    partly = copy.deepcopy(model)
    find_layers(partly).layers[0].load_state_dict(find_layers(small).layers[0].state_dict())
    found: dict[str, Statistics] = {}
    here = stacked(model)
    stream(partly, text(), here, "norms", lambda _, s: found.update(s))
    for p in here:
        wanted = METHODS["wanda"]()(p.weight(model), 0.5, found[p.name])
        torch.testing.assert_close(p.weight(small), wanted)
        assert not torch.equal(p.weight(small), p.weight(model))
        if p.expert is None:
            assert p.head is not None


@pytest.mark.parametrize("name", [*CASES, "inkling_text"])
def test_bounds_are_checked_on_what_enters(name: str) -> None:
    model = make_zoo(name)
    report = check_bounds(model, text()[:1], sparsity=0.5)
    assert report.passed
    names = [p.name for p in stacked(model) if p.expert is None]
    assert not set(names) & set(report.unseen)
    here = {p.name: p.weight(model) / 2 for p in stacked(model)}
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with torch.no_grad(), approximate(model, here) as records:
        model(text()[:1], use_cache=False)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(records[name].energy > 0 for name in names)


@pytest.mark.parametrize("name", [*CASES, "inkling_text"])
def test_low_rank_updates_train_and_merge(name: str) -> None:
    model = in_double(name)
    here = {p.name: p for p in stacked(model)}
    before = {name: p.weight(model).clone() for name, p in here.items()}
    with low_rank_updates(model, 1) as factors:
        moved = {
            key: f for key, f in factors.items() if any(p.module in key and p.parameter in key for p in here.values())
        }
        assert moved
        logits = model(text(), use_cache=False).logits
        gradients = torch.autograd.grad(logits.square().sum(), list(factors.values()), allow_unused=True)
        by_name = dict(zip(factors, gradients, strict=True))
        assert all(by_name[key] is not None and by_name[key].any() for key in moved if key.endswith("B"))  # type: ignore[union-attr]
        for factor in moved.values():
            factor.data.normal_()
        with torch.no_grad():
            wanted = model(text(), use_cache=False).logits
    with torch.no_grad():
        torch.testing.assert_close(model(text(), use_cache=False).logits, wanted, rtol=1e-6, atol=1e-6)
    for key, p in here.items():
        assert torch.linalg.matrix_rank(p.weight(model) - before[key]) == 1
