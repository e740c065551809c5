"""Sums over what enters and leaves matrices while a model runs: the statistics that a compression goes by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import feature_energy, lift
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.projections import Projection


def require_seen(projections: Sequence[Projection]) -> None:
    """Raise LyapunovPruneError for experts that a family fuses: no hook sees what enters them."""
    fused = next((p.name for p in projections if p.expert is not None), None)
    if fused:
        raise LyapunovPruneError(f"the inputs of {fused} are not seen outside its fused forward; use method magnitude")


class Gathering:
    """Sums over the tokens that enter `projections`, and over the gradients that come back to them.

    `needs` is `norms`, `gram` or `sensitivity`, as `stream` says. Matrices that are given the same tensor share a sum.
    """

    def __init__(self, model: PreTrainedModel, projections: Sequence[Projection], needs: str) -> None:
        self.projections, self.needs = projections, needs
        self.modules = {p.module: model.get_submodule(p.module) for p in projections}
        self.energy: dict[str, torch.Tensor] = {}
        self.grams: dict[str, torch.Tensor] = {}
        self.sensitivities: dict[str, torch.Tensor] = {}
        self._leader: dict[str, str] = {}  # the first of the matrices that are given the same tensor
        self._last: tuple[torch.Tensor | None, str] = (None, "")
        self._outputs: list[tuple[str, torch.Tensor]] = []

    def watching(self) -> AbstractContextManager[None]:
        return hooked(after=[(module, self._hook(name)) for name, module in self.modules.items()])

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
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
            self._sum(self.energy, name, feature_energy(x))
        else:
            self._sum(self.grams, name, _gram(x))

    @staticmethod
    def _sum(sums: dict[str, torch.Tensor], name: str, more: torch.Tensor) -> None:
        sums[name] = sums[name] + more if name in sums else more

    @torch.enable_grad()
    def differentiate(self, output: torch.Tensor, generator: torch.Generator) -> None:
        """Add the gradients, at the outputs of the matrices, of a random product with the layer's output."""
        # Window by window: of how many there are at once the numbers drawn would depend.
        v = torch.stack([torch.randn(window.shape, generator=generator) for window in output]).to(output)
        grads = torch.autograd.grad(output, [y for _, y in self._outputs], v, allow_unused=True)
        for (name, _), g in zip(self._outputs, grads, strict=True):
            if g is not None:
                self._sum(self.sensitivities, name, _gram(g))
        self._outputs = []

    def statistics(self) -> dict[str, Statistics]:
        """The statistics of every matrix, by its name.

        Raises LyapunovPruneError for a matrix that no token reached, and for activations that are not finite.
        """
        result: dict[str, Statistics] = {}
        for p in self.projections:
            if p.module not in self._leader:
                raise LyapunovPruneError(f"{p.name} took no part in the calibration forward; give more text")
            leader = self._leader[p.module]
            gram = self.grams.get(leader)
            energy = self.energy[leader] if gram is None else gram.diagonal()
            if not energy.isfinite().all():
                raise LyapunovPruneError(
                    f"NaN or infinite activations in the calibration enter {p.name}; check the weights"
                )
            sensitivity = self.sensitivities.get(p.module)
            if sensitivity is not None:
                sensitivity = sensitivity[p.start : p.stop, p.start : p.stop]
            result[p.name] = Statistics(energy.sqrt(), gram, sensitivity)
        return result


def _gram(x: torch.Tensor) -> torch.Tensor:
    rows = lift(x.detach().reshape(-1, x.shape[-1]))
    return rows.T @ rows
