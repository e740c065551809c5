"""The linear map from a recurrent state to the state some tokens later, measured with states that are moved far.

With the inputs of a layer unchanged, its state follows `S_{t+1} = T_t(S_t) + b_t`, so that an error follows
`δ_{t+k} = M_k δ_t` with `M_k = T_{t+k-1} … T_t`, whatever the state. Two forms are known:

- entry by entry, `T(S) = a ⊙ S` (Mamba, Mamba-2, RG-LRU, lightning attention): moving every entry of a state by a
  constant c changes the later state by `c M_k`;
- one matrix per head, `T(S) = a (I − β k kᵀ) S` (the gated delta rule): moving a state by c times the unit matrix
  changes the later state by `c M_k`.

The form of a layer is found by trying both: M_k must map every random error to what became of it.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from lyapunov_prune.linalg import widen


class Transition:
    """M_k of one layer's state (windows × …), measured with `probes` moved states (`moves`)."""

    def __init__(self, state: torch.Tensor, epsilon: float) -> None:
        self._state, self._epsilon = state, epsilon
        self._form: str | None = None
        # For matrix states (windows × heads × rows × columns), probes add the unit matrix, a state's columns at a time.
        self._size = state.shape[-2] if state.ndim == 4 else 0
        self.probes = 1 + (math.ceil(self._size / state.shape[-1]) if self._size else 0)
        # A power of two as large as the state, so that adding it and dividing by it rounds little.
        largest = float(widen(state).abs().max())
        self._far = 2.0 ** math.ceil(math.log2(largest)) if 0 < largest < math.inf else 1.0
        self._unit = max(torch.finfo(state.dtype).eps, torch.finfo(torch.float32).eps)  # families compute in float32

    def moves(self) -> list[torch.Tensor]:
        """What each probe adds to the state, (…) without windows."""
        shape, like = self._state.shape[1:], self._state
        constant = torch.ones(shape, dtype=like.dtype, device=like.device)
        moves = [constant]
        if self._size:
            unit = torch.eye(self._size, dtype=like.dtype, device=like.device)
            for columns in unit.split(shape[-1], dim=1):
                padded = torch.zeros_like(constant)
                padded[..., : columns.shape[1]] = columns
                moves.append(padded)
        return [move * self._far for move in moves]

    def bound(self, k: int, probes: list[torch.Tensor], errors: torch.Tensor) -> np.ndarray:
        """The norm of M_k for each window plus an allowance for rounding; NaN if no form gives the `errors`.

        `probes` are the differences of the probe rows from the clean ones, `errors` those of the seeds (S, windows, …),
        all in float64 and k tokens after the state was moved.
        """
        if k == 0:
            self._begun = errors
            return np.ones(errors.shape[1])
        entries = probes[0] / self._far
        norm = None
        if self._form in (None, "entries") and self._gives(k, entries * self._begun, errors):
            self._form, norm = "entries", entries.abs().flatten(1).amax(1)
        elif self._form in (None, "matrix") and self._size:
            M = torch.cat(probes[1 : self.probes], -1)[..., : self._size] / self._far
            if self._gives(k, M @ self._begun, errors):
                self._form, norm = "matrix", torch.linalg.matrix_norm(M, ord=2).amax(1)
        if norm is None:
            self._form = "unknown"
            return np.full(errors.shape[1], np.nan)
        return norm.cpu().numpy() + 4 * k * self._unit

    def _gives(self, k: int, expected: torch.Tensor, errors: torch.Tensor) -> bool:
        """Whether `expected` equals the errors, up to the rounding of a difference that is ε of the state."""
        off = torch.linalg.vector_norm((expected - errors).flatten(2), dim=-1)
        begun = torch.linalg.vector_norm(self._begun.flatten(2), dim=-1)
        return bool((off <= 20 * k * self._unit / self._epsilon * begun).all())
