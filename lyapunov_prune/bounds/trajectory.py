"""Dense and approximated states side by side, layer by layer, up to the prediction."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.bounds.alignment import AlignmentSums, LayerAlignment
from lyapunov_prune.bounds.approximate import Records
from lyapunov_prune.bounds.decision import TokenCertificate, argmax_unchanged_of_state_error
from lyapunov_prune.bounds.growth import ErrorGrowth
from lyapunov_prune.forward.hooks import hidden_of, residual_stream
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.linalg import require_numbers, token_energy, widen
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.progress import track


@dataclass(frozen=True)
class Followed:
    """What was measured along both trajectories: growth of the error, alignment of the layers, moved predictions."""

    growth: ErrorGrowth
    alignment: LayerAlignment
    decisions: TokenCertificate


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

    def result(self) -> Followed:
        """What was measured so far. A prediction is certified by how far the input of the head moved."""
        state, changed = (torch.cat([pair[i] for pair in self.states]) for i in (0, 1))
        head: Any = self.model.get_output_embeddings()
        unit = 2.0**-52 if self.model.dtype == torch.float64 else 2.0**-23
        return Followed(
            ErrorGrowth(self.size, self.error, self.stretched, self.local, unit),
            self.alignment.result(),
            argmax_unchanged_of_state_error(state, changed, head.weight, getattr(head, "bias", None)),
        )

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


def followed_on(reading: Reading, records: Records, batch_size: int) -> Followed:
    """Run the windows through the dense and the approximated model, layer by layer."""
    with records.installed():
        trajectory = Trajectory(reading.model, reading.structure, records)
        for ids in track(reading.windows(batch_size), "bounds"):
            trajectory.follow(ids)
    return trajectory.result()


def _energy(a: torch.Tensor, b: torch.Tensor) -> float:
    energy = float(token_energy(widen(a) - widen(b)).sum())
    require_numbers(np.array(energy), "energy of the activations")
    return energy
