"""Experts are calibrated on what the router sends them: against float64 references with the experts unfused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families.zoo import CHANGES, settings_of
from helpers import as_batch, hooks_of, with_large_weights
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lyapunov_prune import LyapunovPruneError, compress
from lyapunov_prune.calibration.norms import input_norms
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.experts import Routing
from lyapunov_prune.models.projections import find_projections
from lyapunov_prune.models.structure import find_layers

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3", "gpt_oss", "nemotron_h")
LAYER = 1


def mixture(kind: str) -> Any:
    """Two layers in float64, the last with experts."""
    config: Any = CONFIG_MAPPING[kind]
    settings = settings_of(config, CHANGES.get(kind, {})) | {"num_hidden_layers": 2}
    small = {"first_k_dense_replace": 1, "mlp_only_layers": [0], "layers_block_type": ["full_attention", "moe"]}
    settings |= {key: value for key, value in small.items() if key in settings}
    torch.manual_seed(0)
    model: Any = with_large_weights(AutoModelForCausalLM.from_config(config(**settings)).eval()).double()
    model.set_experts_implementation("eager")  # torch has no grouped product of float64
    return model


@pytest.fixture
def text() -> torch.Tensor:
    """So few tokens that the router sends some experts fewer than their matrices have inputs."""
    return torch.randint(3, 90, (3, 22), generator=torch.Generator().manual_seed(0))


class Unfused(nn.Module):
    """The experts of a fused module as linear layers, in a plain loop over tokens that notes what is multiplied."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.kind, self.act, self.gated = type(fused).__name__, getattr(fused, "act_fn", None), fused.has_gate
        self.limit, self.alpha = getattr(fused, "limit", None), getattr(fused, "alpha", None)
        self.first = "gate_up_proj" if self.gated else "up_proj"
        self.linears = nn.ModuleDict()
        for key in (self.first, "down_proj"):
            self.linears[key] = nn.ModuleList()
            for expert, stored in enumerate(getattr(fused, key).detach()):
                W = stored.T if self.kind == "GptOssExperts" else stored
                linear = nn.Linear(W.shape[1], W.shape[0], bias=fused.has_bias, dtype=W.dtype)
                linear.weight.data = W.clone()
                if fused.has_bias:
                    linear.bias.data = getattr(fused, f"{key}_bias").detach()[expert].clone()
                self.linears[key].append(linear)
        self.notes: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        self.tokens: list[torch.Tensor] = []
        self.routed: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def activated(self, y: torch.Tensor) -> torch.Tensor:
        if self.kind == "GptOssExperts":  # gate and up alternate
            gate, up = y[::2].clamp(max=self.limit), y[1::2].clamp(-self.limit, self.limit)
            return (up + 1) * gate * torch.sigmoid(self.alpha * gate)
        if not self.gated:
            return self.act(y)
        return self.act(y[: len(y) // 2]) * y[len(y) // 2 :]

    def expert(self, expert: int, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        up, down = (self.linears[key][expert] for key in (self.first, "down_proj"))  # type: ignore[index]
        y = up(x)
        hidden = self.activated(y)
        z = down(hidden)
        self.notes.setdefault((self.first, expert), []).append((x, w, y))
        self.notes.setdefault(("down_proj", expert), []).append((hidden, w, z))
        return w * z

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.tokens += x.detach()
        self.routed.append(weights.detach().flatten())
        every = zip(x, chosen.tolist(), weights, strict=True)
        self.outputs.append(
            torch.stack([sum(self.expert(e, t, w) for e, w in zip(c, ws, strict=True)) for t, c, ws in every])
        )
        return self.outputs[-1]


def unfused(model: Any) -> tuple[Any, Unfused, str]:
    """A copy of `model`, the experts of its layer, now unfused, and where they are."""
    model = copy.deepcopy(model)
    (name,) = {p.module for p in find_projections(wrap(model)) if p.layer == LAYER and p.expert is not None}
    parent, _, child = name.rpartition(".")
    module = Unfused(model.get_submodule(name))
    setattr(model.get_submodule(parent), child, module)
    return model, module, name


def reference(model: Any, text: torch.Tensor, needs: str = "gram") -> dict[str, Statistics]:
    """The statistics of the experts of the layer as `Statistics` defines them, straight from the unfused model."""
    model, module, name = unfused(model)
    left: list[torch.Tensor] = []
    find_layers(model).layers[LAYER].register_forward_hook(
        lambda m, a, y: left.append(y if isinstance(y, torch.Tensor) else y[0])
    )
    generator = torch.Generator().manual_seed(LAYER)
    gradients: list[torch.Tensor] = []
    squares: dict[tuple[str, int], Any] = {}

    def gradients_of(output: torch.Tensor, v: torch.Tensor, notes: dict[Any, Any]) -> None:
        for key, rows in notes.items() if needs == "sensitivity" else ():
            if not rows:
                continue
            gs = torch.autograd.grad(output, [y for _, _, y in rows], v, retain_graph=True, allow_unused=True)
            squares[key] = squares.get(key, 0) + sum(torch.outer(g, g) for g in gs if g is not None)

    for window in text.split(1):
        before = {key: len(rows) for key, rows in module.notes.items()}
        model(window, use_cache=False)
        v = torch.stack([torch.randn(h.shape, generator=generator) for h in left[-1]]).to(left[-1])
        gradients_of(left[-1], v, {key: rows[before.get(key, 0) :] for key, rows in module.notes.items()})
        gradients += torch.autograd.grad(left[-1], module.outputs[-1], v)[0]
    given = {key: len(rows) for key, rows in module.notes.items()}
    mean = torch.cat(module.routed).square().mean().sqrt()
    for key, linears in module.linears.items():
        for expert, linear in enumerate(linears):  # type: ignore[arg-type]
            n = linear.in_features
            if (missing := n - given.get((key, expert), 0)) > 0:
                lent = list(zip(module.tokens, gradients, strict=True))[:missing]
                module.notes, kept = {}, module.notes
                out = torch.stack([module.expert(expert, x, mean) for x, _ in lent])
                mine = {(key, expert): module.notes[key, expert]}
                gradients_of(out, torch.stack([g for _, g in lent]), mine)
                module.notes = kept
                kept[key, expert] = kept.get((key, expert), []) + mine[key, expert]
    found = {}
    for (key, expert), rows in module.notes.items():
        X = torch.stack([x for x, _, _ in rows]).detach() * torch.stack([w for _, w, _ in rows]).detach()[:, None]
        X = X.double()
        found[f"{name}.{key}:{expert}"] = Statistics(
            X.norm(dim=0), X.T @ X, squares.get((key, expert)), None, X.abs().sum(0), given.get((key, expert), 0)
        )
    return found


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


def test_planted_fault_the_weights_of_another_expert_are_seen(
    text: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, of_expert = mixture("mixtral"), Routing.of_expert
    wanted = reference(model, text)

    def others(self: Routing, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weights = of_expert(self, expert)
        return rows, self.weights.sum(1)[rows] - weights

    monkeypatch.setattr(Routing, "of_expert", others)
    found = gathered(model, text, "norms")
    assert not any(torch.allclose(s.norms, wanted[name].norms, rtol=1e-3) for name, s in found.items())


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
