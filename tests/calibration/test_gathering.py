"""Experts are calibrated on what the router sends them: against float64 references with the experts unfused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import as_batch, hooks_of
from helpers.unfused import LAYER, mixture, reference, unfused

from lyapunov_prune import LyapunovPruneError, compress
from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.experts import Routing
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.structure import find_layers

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3", "gpt_oss", "nemotron_h")


@pytest.fixture
def text() -> torch.Tensor:
    """So few tokens that the router sends some experts fewer than their matrices have inputs."""
    return torch.randint(3, 90, (3, 22), generator=torch.Generator().manual_seed(0))


def gathered(model: Any, text: torch.Tensor, needs: str) -> dict[str, Statistics]:
    found: dict[str, Statistics] = {}
    here = [p for p in find_projections(wrap(model)) if p.layer == LAYER]
    stream(model, as_batch(model, text), here, needs, lambda here, s: found.update(s))
    assert hooks_of(model) == 0
    return {name: s for name, s in found.items() if ":" in name}


@pytest.mark.parametrize("kind", FAMILIES)
def test_statistics_of_experts_are_those_of_the_unfused_model(kind: str, text: torch.Tensor) -> None:
    model = mixture(kind)
    wanted, found = reference(model, text, "sensitivity"), gathered(model, text, "sensitivity")
    assert found.keys() == wanted.keys()
    for name, s in found.items():
        torch.testing.assert_close(s.gram, wanted[name].gram, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(s.norms, wanted[name].norms, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(s.sensitivity, wanted[name].sensitivity, rtol=1e-9, atol=1e-9)
        assert s.tokens == wanted[name].tokens
    sums = gathered(model, text, "magnitudes")
    for name, s in sums.items():
        torch.testing.assert_close(s.magnitudes, wanted[name].magnitudes, rtol=1e-10, atol=1e-10)
    norms = input_norms(model, as_batch(model, text), find_projections(wrap(model)))
    for name, s in wanted.items():
        torch.testing.assert_close(norms[name], s.norms, rtol=1e-10, atol=1e-10)


METHODS_TRIED: dict[str, dict[str, Any]] = {
    "wanda": {"sparsity": 0.5}, "sparsegpt": {"sparsity": 0.5}, "gptq": {"bits": 4}, "awq": {"bits": 4},
    "whitened-svd": {"rank": 6}, "balanced": {"rank": 6},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_compressed_experts_are_those_of_the_unfused_model(kind: str, text: torch.Tensor) -> None:
    """The second layer sees what the first one, compressed, gives it."""
    model = mixture(kind)
    experts = [p for p in find_projections(wrap(model)) if p.layer == LAYER and p.expert is not None]
    for method, amount in METHODS_TRIED.items():
        small = compress(model, text, method=method, **amount)
        partly = copy.deepcopy(model)
        first = find_layers(small.model).layers[0].state_dict()
        find_layers(partly).layers[0].load_state_dict(first)
        wanted = reference(partly, text, METHODS[method].needs)
        told = {m.name: m for m in small.report.matrices}
        for p in experts:
            compressed = METHODS[method]()(p.weight(model), next(iter(amount.values())), wanted[p.name])
            limit = 1e-6 if "rank" in amount else 1e-10  # singular vectors turn far more than the Gram matrix moves
            torch.testing.assert_close(p.weight(small.model), compressed, rtol=0, atol=limit, msg=f"{method} {p.name}")
            assert not torch.equal(p.weight(small.model), p.weight(model))
            assert told[p.name].tokens == wanted[p.name].tokens


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(("method", "amount"), [("gptq", 3), ("sparsegpt", 0.5)])
def test_a_correction_compares_the_tokens_that_the_dense_router_sends(kind: str, method: str, amount: float) -> None:
    model = mixture(kind)
    text = torch.randint(3, 90, (2, 120), generator=torch.Generator().manual_seed(0))
    of_amount: Any = {"bits" if method == "gptq" else "sparsity": amount}
    small = compress(model, text, method=method, correction=0.5, **of_amount).model
    partly = copy.deepcopy(model)
    find_layers(partly).layers[0].load_state_dict(find_layers(small).layers[0].state_dict())
    (dense, before, _), (changed, after, _) = unfused(model), unfused(partly)
    calls: list[Any] = []
    before.register_forward_pre_hook(lambda m, args: calls.append(args[1:]))
    after.register_forward_pre_hook(lambda m, args: (args[0], *calls.pop(0)))
    with torch.no_grad():
        dense(text, use_cache=False)
        changed(text, use_cache=False)
    compared, by = 0, METHODS.make(method, correction=0.5)
    for p in find_projections(wrap(model)):
        rows = [note.get((p.component.split(".")[-1], p.expert), []) for note in (before.notes, after.notes)]
        if p.layer != LAYER or p.expert is None or len(rows[0]) < p.weight(model).shape[1]:
            continue
        roots = torch.stack([w for _, w, _ in rows[0]])[:, None]
        x0, x = (torch.stack([x for x, _, _ in row]) * roots for row in rows)
        assert not torch.allclose(x0, x)
        wanted = by(p.weight(model), amount, Statistics(x.norm(dim=0), x.T @ x, None, (x0 - x).T @ x))
        torch.testing.assert_close(p.weight(small), wanted, rtol=0, atol=1e-8, msg=p.name)
        compared += 1
    assert compared > 2


def test_tokens_in_another_order_than_the_router_says_are_refused(
    text: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, of_expert = mixture("mixtral"), Routing.of_expert

    def turned(self: Routing, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weights = of_expert(self, expert)
        return rows.flip(0), weights.flip(0)

    monkeypatch.setattr(Routing, "of_expert", turned)
    with pytest.raises(LyapunovPruneError, match=r"expert \d of model\.layers\.1\.mlp\.experts"):
        gathered(model, text, "norms")
