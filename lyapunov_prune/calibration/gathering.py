"""Calibration statistics: sums over the inputs of matrices, and over gradients at their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

    `needs` is `norms`, `gram`, `magnitudes` or `sensitivity`, as in `stream`. Matrices with the same input tensor share
    a sum. With `weights` (by module, of the tokens of each of its calls in order) tokens count by these, and no sum is
    shared. `dense`, for the drift, gives by module what has entered it in the dense model for the same tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        projections: Sequence[Projection],
        needs: str,
        weights: Mapping[str, Iterator[torch.Tensor]] | None = None,
        dense: Mapping[str, list[torch.Tensor]] | None = None,
    ) -> None:
        self.projections, self.needs, self.weights, self.dense = projections, needs, weights, dense
        self.modules = {p.module: model.get_submodule(p.module) for p in projections}
        self.energy: dict[str, torch.Tensor] = {}
        self.grams: dict[str, torch.Tensor] = {}
        self.drifts: dict[str, torch.Tensor] = {}
        self.magnitudes: dict[str, torch.Tensor] = {}
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
        if leader == name or self.weights is not None:
            self._add(name, x.detach().reshape(-1, x.shape[-1]))
        if self.needs == "sensitivity":
            output = output if output.requires_grad else output.requires_grad_()
            self._outputs.append((name, output, rows_are_features))

    def _add(self, name: str, x: torch.Tensor) -> None:
        if self.needs == "norms":
            self._sum(self.energy, name, feature_energy(x))
            return
        rows = lift(x)
        root: torch.Tensor | float = 1.0
        if self.weights is not None:
            root = _of_tokens(name, x, next(self.weights[name], None)).sqrt().unsqueeze(1)
        self._sum(self.grams, name, _gram(rows * root))
        if self.needs == "magnitudes":
            self._sum(self.magnitudes, name, rows.abs().sum(0))
        if self.dense is not None:
            calls = self.dense.get(name)
            before = lift(_of_tokens(name, x, calls.pop(0).flatten(0, -2) if calls else None))
            self._sum(self.drifts, name, ((before - rows) * root).T @ (rows * root))

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
            leader = p.module if self.weights is not None else self._leader[p.module]
            gram = self.grams.get(leader)
            energy = self.energy[leader] if gram is None else gram.diagonal()
            if not energy.isfinite().all():
                raise LyapunovPruneError(
                    f"NaN or infinite activations in the calibration enter {p.name}; check the weights"
                )
            sensitivity = self.sensitivities.get(p.module)
            if sensitivity is not None:
                sensitivity = sensitivity[p.start : p.stop, p.start : p.stop]
            result[p.name] = Statistics(
                energy.sqrt(), gram, sensitivity, self.drifts.get(leader), self.magnitudes.get(leader)
            )
        return result


def _of_tokens(name: str, x: torch.Tensor, dense: torch.Tensor | None) -> torch.Tensor:
    """`dense`, found in the dense model, on the device of `x`; LyapunovPruneError unless it is of the same tokens."""
    if dense is None or len(dense) != len(x):
        raise LyapunovPruneError(
            f"{name} is not given the same tokens in the dense and in the compressed model, as an expert that they are "
            "routed to; leave out --weighted and --correction"
        )
    return dense.to(x.device)


def _gram(x: torch.Tensor) -> torch.Tensor:
    rows = lift(x.detach().reshape(-1, x.shape[-1]))
    return rows.T @ rows
