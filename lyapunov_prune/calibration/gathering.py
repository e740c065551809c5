"""Calibration statistics: sums over the inputs of matrices, and over gradients at their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.products import watched_products
from lyapunov_prune.linalg import feature_energy, lift
from lyapunov_prune.models.projections import Projection

# The remedy where the inputs of a matrix cannot be recorded; more text would not help.
_UNCALIBRATED = "use a method without calibration (--method magnitude, --allocation uniform)"


def require_seen(projections: Sequence[Projection]) -> None:
    """Raise LyapunovPruneError for fused experts, whose inputs no hook sees."""
    fused = next((p.name for p in projections if p.expert is not None), None)
    if fused:
        raise LyapunovPruneError(f"the inputs of {fused} cannot be recorded outside its fused forward; {_UNCALIBRATED}")


class Gathering:
    """Sums over the input tokens of `projections`, and over the gradients at their outputs.

    `needs` is `norms`, `gram` or `sensitivity`, as in `stream`. Matrices with the same input tensor share a sum.
    """

    def __init__(self, model: PreTrainedModel, projections: Sequence[Projection], needs: str) -> None:
        self.projections, self.needs = projections, needs
        self.modules = {p.module: model.get_submodule(p.module) for p in projections}
        self.energy: dict[str, torch.Tensor] = {}
        self.grams: dict[str, torch.Tensor] = {}
        self.sensitivities: dict[str, torch.Tensor] = {}
        self._leader: dict[str, str] = {}  # the first matrix with the same input tensor
        self._last: tuple[torch.Tensor | None, str] = (None, "")
        self._outputs: list[tuple[str, torch.Tensor, bool]] = []

    def watching(self) -> AbstractContextManager[None]:
        return watched_products(self.modules, self._seen)

    def _seen(self, name: str, x: torch.Tensor, output: torch.Tensor, rows_are_features: bool) -> None:
        before, leader = self._last
        if x is not before:
            leader = name
        self._last = (x, leader)
        if self._leader.setdefault(name, leader) != leader:
            raise LyapunovPruneError(
                f"{name} is called more than once a forward, with other inputs, as a module that layers share; "
                f"{_UNCALIBRATED}"
            )
        if leader == name:
            self._add(name, x.detach().reshape(-1, x.shape[-1]))
        if self.needs == "sensitivity":
            output = output if output.requires_grad else output.requires_grad_()
            self._outputs.append((name, output, rows_are_features))

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
        # One window at a time, so that the random numbers do not depend on the batch size.
        v = torch.stack([torch.randn(window.shape, generator=generator) for window in output]).to(output)
        grads = torch.autograd.grad(output, [y for _, y, _ in self._outputs], v, allow_unused=True)
        for (name, _, rows_are_features), g in zip(self._outputs, grads, strict=True):
            if g is not None:
                self._sum(self.sensitivities, name, _gram(g.transpose(-1, -2) if rows_are_features else g))
        self._outputs = []

    def statistics(self) -> dict[str, Statistics]:
        """The statistics of every matrix, by name.

        Raises LyapunovPruneError for a matrix without an observed product, and for activations that are not finite.
        """
        result: dict[str, Statistics] = {}
        for p in self.projections:
            if p.module not in self._leader:
                raise LyapunovPruneError(
                    f"no product with {p.name} is seen in a forward of the calibration text: no token reaches it (an "
                    "expert: give more text), text alone does not use it (attention to an encoder), or a fused kernel "
                    f"multiplies by it; {_UNCALIBRATED}"
                )
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
