"""Dense and approximated states side by side, layer by layer, up to the prediction."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.bounds.alignment import AlignmentSums
from lyapunov_prune.bounds.approximate import Records
from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.checkers import lyapunov_contraction_bound, residual_growth_contraction, trajectory_error_le
from lyapunov_prune.bounds.decision import TokenCertificate, argmax_unchanged_of_state_error
from lyapunov_prune.bounds.phases import TwoPhases, relative_phases
from lyapunov_prune.forward.hooks import hidden_of, residual_stream
from lyapunov_prune.linalg import require_numbers, token_energy, widen
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure


class Trajectory:
    """Growth and local error of every layer on the windows that were followed.

    With `h` dense and `h'` approximated, the exact layer k also runs on `h'_k` (with the arguments of the model's own
    call), which gives both `‖f(h) − f(h')‖` and `‖f(h') − g(h')‖`. Squares are summed over all windows, as one vector.
    """

    def __init__(self, model: PreTrainedModel, structure: Structure, records: Records) -> None:
        self.model, self.structure, self.records = model, structure, records
        self.size, self.error, self.stretched, self.local = (np.zeros(structure.num_layers + i) for i in (1, 1, 0, 0))
        self.alignment = AlignmentSums(structure.num_layers)
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []

    def follow(self, ids: torch.Tensor) -> None:
        """Run windows through both models; call inside the block of `approximate`."""
        dense: list[torch.Tensor] = []
        with self.records.suspended(), residual_stream(self.structure, lambda k, h: dense.append(h)):
            state = self._head_input(ids)
        exact: list[torch.Tensor] = []
        before: list[torch.Tensor] = []

        def visit(k: int, hidden: torch.Tensor) -> None:
            self.size[k] += float(token_energy(widen(dense[k])).sum())
            self.error[k] += _energy(dense[k], hidden)
            if k > 0:
                self.stretched[k - 1] += _energy(dense[k], exact[-1])
                self.alignment.add(k - 1, (dense[k - 1], before.pop()), (dense[k], exact[-1]))
                self.local[k - 1] += _energy(exact.pop(), hidden)
            before.append(hidden)

        with self._exact_layers(exact), residual_stream(self.structure, visit):
            changed = self._head_input(ids)
        self.states.append((state, changed))

    def composition(self) -> tuple[BoundCheck, ...]:
        """The error after each layer against the composed bound, with measured growth (estimates)."""
        return trajectory_error_le(np.sqrt(self.error), self._growth(), np.sqrt(self.local), unit=self._unit)

    def contraction(self) -> tuple[BoundCheck, ...]:
        """Theorems 9 and 8 on the relative error `r_k = ‖h_k − h'_k‖ / ‖h_k‖`, with measured factors (estimates).

        Theorem 9: one check for each layer where the error, including the layer's own, grows less than the state (`K +
        δ/‖e‖`), so that `r` must fall. Theorem 8: one check from the end of layer 0 on (no error enters layer 0), if
        `gamma` is below one.
        """
        relative, state = self.error / self.size, self.size[1:] / self.size[:-1]
        reached = np.sqrt(self.stretched) + np.sqrt(self.local)
        growth = np.divide(reached**2, self.error[:-1], out=np.full_like(reached, np.inf), where=self.error[:-1] > 0)
        checks = residual_growth_contraction(relative, growth, state, unit=self._unit)
        if self.gamma < 1 and len(state) > 1:
            added = float(np.sqrt(self.local / self.size[1:])[1:].max())
            checks += (lyapunov_contraction_bound(np.sqrt(relative[1:]), self.gamma, added, unit=self._unit),)
        return checks

    def phases(self) -> TwoPhases | None:
        """The bound in two phases on the relative error (estimate)."""
        return relative_phases(self.size, self.error, self._growth(), self.local)

    @property
    def gamma(self) -> float:
        """`γ = max_k K_k ‖h_k‖ / ‖h_{k+1}‖`, the largest growth factor of the relative error over the layers."""
        return float((self._growth() * np.sqrt(self.size[:-1] / self.size[1:])).max())

    def _growth(self) -> np.ndarray:
        """`K_k = ‖f(h_k) − f(h'_k)‖ / ‖h_k − h'_k‖`, 0 where there is no error yet."""
        error, stretched = np.sqrt(self.error[:-1]), np.sqrt(self.stretched)
        return np.divide(stretched, error, out=np.zeros_like(stretched), where=error > 0)

    @property
    def _unit(self) -> float:
        return 2.0**-52 if self.model.dtype == torch.float64 else 2.0**-23

    def decisions(self) -> TokenCertificate:
        """Which predictions cannot have changed, given how far the input of the head moved."""
        state, changed = (torch.cat([pair[i] for pair in self.states]) for i in (0, 1))
        head: Any = self.model.get_output_embeddings()
        return argmax_unchanged_of_state_error(state, changed, head.weight, getattr(head, "bias", None))

    def _head_input(self, ids: torch.Tensor) -> torch.Tensor:
        states: list[torch.Tensor] = []

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.append(args[0].detach().flatten(0, -2))

        head: Any = self.model.get_output_embeddings()
        with hooked(before=[(head, hook)]):
            self.model(input_ids=ids, use_cache=False)
        return states[0]

    def _exact_layers(self, outputs: list[torch.Tensor]) -> AbstractContextManager[None]:
        """Before each layer runs, record the output of the exact layer for the same arguments."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with self.records.suspended():
                outputs.append(hidden_of(module.forward(*args, **kwargs)))

        return hooked(before=[(layer, before) for layer in self.structure.layers])


def _energy(a: torch.Tensor, b: torch.Tensor) -> float:
    energy = float(token_energy(widen(a) - widen(b)).sum())
    require_numbers(np.array(energy), "energy of the activations")
    return energy
