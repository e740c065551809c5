"""A tiny mixture in float64 and the statistics of its experts, straight from linear layers without the stack."""

from __future__ import annotations

import copy
from typing import Any

import torch
from families.zoo import CHANGES, settings_of
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from helpers import with_large_weights
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.structure import find_layers

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
