"""Calibration layer by layer: what enters every matrix once the layers before it are compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.compression.statistics import Statistics
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift, token_energy
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.prefix import Prefix
from lyapunov_prune.progress import track
from lyapunov_prune.text import TokenBatch

# Called with a layer's matrices and what entered each; changes the layer's weights before it returns.
Change = Callable[[Sequence[Projection], dict[str, Statistics]], None]


def stream(
    model: PreTrainedModel,
    batch: TokenBatch,
    projections: Sequence[Projection],
    needs: str,
    change: Change,
    *,
    batch_size: int = 1,
    seed: int = 0,
) -> None:
    """Go through the layers in order: gather what enters each, let `change` compress it, hand on its new output.

    Every layer runs twice, once for its statistics and once, compressed, for the input of the next: two
    forwards of the layers in all. The arguments of a layer (masks, positions) are those that the model's own
    forward hands it (`Prefix`); nothing is captured and replayed. Where a layer uses more of the earlier ones than
    their hidden state, the forward begins further back and is the same.

    `needs` is `norms`, `gram` (`Σ_t x_t x_tᵀ`, n × n, float64, one for matrices that share their input), or
    `sensitivity`: also `Σ_t g_t g_tᵀ`, `g` the gradient at the matrix's output of `⟨v, layer output⟩` with
    `v ~ N(0, I)` drawn from `seed`: in expectation `Σ Jᵀ J`, `J` the derivative of the layer's output.
    Memory: the hidden states of the batch, twice at most, and the statistics of one layer.

    Raises LyapunovPruneError for experts that a family fuses, whose inputs cannot be seen, for a matrix that no
    token reached, and for activations that are not finite.
    """
    fused = next((p.name for p in projections if p.expert is not None), None)
    if fused:
        raise LyapunovPruneError(
            f"the inputs of {fused} are not seen outside its fused forward; use method magnitude, svd or rtn"
        )
    structure = find_structure(model)
    windows = [ids.to(model.device) for ids in batch.ids.split(batch_size)]
    with torch.no_grad():
        prefix = Prefix(structure, windows[0])
    states, at = [torch.empty(0)] * len(windows), 0
    generator = torch.Generator().manual_seed(seed)
    for layer in track(range(structure.num_layers), "calibration"):
        here = [p for p in projections if p.layer == layer]
        if not here:
            continue
        if prefix.entry(layer) > at:
            entry = prefix.entry(layer)
            with torch.no_grad():
                states = [prefix.advance(ids, at, h, entry) for ids, h in zip(windows, states, strict=True)]
            at = entry
        gathering = _Gathering(model, here, needs)
        with gathering.watching():
            for ids, hidden in zip(windows, states, strict=True):
                with torch.set_grad_enabled(needs == "sensitivity"):
                    output = prefix.advance(ids, at, hidden, layer + 1)
                if needs == "sensitivity":
                    gathering.differentiate(output, generator)
        change(here, gathering.found())


class _Gathering:
    """Sums over the tokens that enter the matrices of one layer, and over the gradients that come back to them."""

    def __init__(self, model: PreTrainedModel, projections: Sequence[Projection], needs: str) -> None:
        self.projections, self.needs = projections, needs
        self.modules = {p.module: model.get_submodule(p.module) for p in projections}
        self.energy: dict[str, torch.Tensor] = {}
        self.grams: dict[str, torch.Tensor] = {}
        self.sensitivities: dict[str, torch.Tensor] = {}
        self._leader: dict[str, str] = {}  # the first of the matrices that are given the same tensor
        self._last: tuple[torch.Tensor | None, str] = (None, "")
        self._outputs: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [m.register_forward_hook(self._hook(name)) for name, m in self.modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x, (before, leader) = args[0], self._last
            if x is not before:
                leader = name
            self._last = (x, leader)
            if self._leader.setdefault(name, leader) != leader:
                raise LyapunovPruneError(f"{name} shares its input with other matrices in one window than in another")
            if leader == name:
                self._add(name, x.detach().reshape(-1, x.shape[-1]))
            if self.needs == "sensitivity":
                self._outputs.append((name, output if output.requires_grad else output.requires_grad_()))

        return hook

    def _add(self, name: str, x: torch.Tensor) -> None:
        if self.needs == "norms":
            self._sum(self.energy, name, token_energy(x.T))
        else:
            self._sum(self.grams, name, _gram(x))

    @staticmethod
    def _sum(sums: dict[str, torch.Tensor], name: str, more: torch.Tensor) -> None:
        sums[name] = sums[name] + more if name in sums else more

    @torch.enable_grad()
    def differentiate(self, output: torch.Tensor, generator: torch.Generator) -> None:
        """Add the gradients, at the outputs of the matrices, of a random product with the layer's output."""
        v = torch.randn(output.shape, generator=generator).to(output)
        grads = torch.autograd.grad(output, [y for _, y in self._outputs], v, allow_unused=True)
        for (name, _), g in zip(self._outputs, grads, strict=True):
            if g is not None:
                self._sum(self.sensitivities, name, _gram(g))
        self._outputs = []

    def found(self) -> dict[str, Statistics]:
        """The statistics of every matrix, by its name."""
        result: dict[str, Statistics] = {}
        for p in self.projections:
            if p.module not in self._leader:
                raise LyapunovPruneError(f"{p.name} took no part in the calibration forward; give more text")
            leader = self._leader[p.module]
            gram = self.grams.get(leader)
            energy = self.energy[leader] if gram is None else gram.diagonal()
            if not energy.isfinite().all():
                raise LyapunovPruneError(f"NaN or infinite activations enter {p.name}; check the weights")
            sensitivity = self.sensitivities.get(p.module)
            if sensitivity is not None:
                sensitivity = sensitivity[p.start : p.stop, p.start : p.stop]
            result[p.name] = Statistics(energy.sqrt(), gram, sensitivity)
        return result


def _gram(x: torch.Tensor) -> torch.Tensor:
    rows = lift(x.detach().reshape(-1, x.shape[-1]))
    return rows.T @ rows
