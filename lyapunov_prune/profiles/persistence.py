"""ρ along time: how much of an error in a layer's recurrent state is left after 1 … 64 more tokens.

All rows of a batch read the same tokens from the same cache; they differ in how the state is moved beforehand.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lyapunov_prune.arguments import Count, Positive, Seeds
from lyapunov_prune.forward.hooks import hidden_of, require_finite
from lyapunov_prune.forward.logits import cache_of, only_last, position
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import lift, token_energy, widen
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.recurrence import Carried, carried_states, first_cache, forget_states, select_rows
from lyapunov_prune.profiles.contraction import measure_contraction
from lyapunov_prune.profiles.persistence_profile import PersistenceProfile
from lyapunov_prune.profiles.propagation import RESAMPLES, direction, drawn_windows, listed, require_moved
from lyapunov_prune.progress import track


class Transition:
    """The linear map from a layer's state (windows × …) to the state k tokens later, by `probes` that are moved far.

    With the inputs of a layer unchanged, its state follows `S_{t+1} = T_t(S_t) + b_t`, so that an error follows
    `δ_{t+k} = M_k δ_t` with `M_k = T_{t+k-1} … T_t`, whatever the state. Two forms are known:

    - entry by entry, `T(S) = a ⊙ S` (Mamba, Mamba-2, RG-LRU, lightning attention): moving every entry of a state by a
      constant c changes the later state by `c M_k`;
    - one matrix per head, `T(S) = a (I − β k kᵀ) S` (the gated delta rule): moving a state by c times the unit matrix
      changes the later state by `c M_k`.

    The form of a layer is found by trying both: M_k must map every random error to what became of it.
    """

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


STEPS = 64


@runs_model
def measure_persistence(
    model: InMemory, batch: Readable, *, epsilon: Positive = 1e-2, seeds: Seeds = range(4), batch_size: Count = 1
) -> PersistenceProfile:
    """Measure how long an error in the recurrent state of each layer lasts, and ρ along depth on the same text.

    In every window the model reads all but the last K tokens (K = 64, or half the window if that is less). Then the
    state S of each layer is moved by `ε ‖S‖ u`, with u uniform on the sphere over all its entries, drawn per window and
    seed, and the last K tokens are read one at a time, with and without the error. A layer's own state never reaches
    its own input, so every layer is given the inputs of the clean row: what is left of the error depends on its
    recurrence alone, and all layers are measured in one pass.

    Further rows give the KL divergence of the predictions: in each, one layer's state is moved and the layers after it
    run on what they get. In other rows the state is moved by a large constant, which shows the whole linear map from S
    to the state k tokens later (`Transition`); its norm bounds what is left of any error.

    One forward carries `batch_size × (1 + seeds + layers with a state + 2)` rows of one token, as many caches, and one
    window of context for each.

    Raises LyapunovPruneError for a model without a recurrent state and for an epsilon below rounding; NonFiniteError
    naming the first layer with NaN or infinite activations.
    """
    reading = read(model, batch)
    seeds = listed(seeds)
    parts = [
        _Run(reading, ids, k * batch_size, seeds, epsilon).followed()
        for k, ids in enumerate(track(reading.windows(batch_size), "persistence"))
    ]
    first = parts[0]
    energy = np.concatenate([part.energy for part in parts], axis=2)
    require_moved(float(energy[..., 0].min()), epsilon)
    left = energy / energy[..., :1]
    return PersistenceProfile(
        epsilon=epsilon,
        seeds=seeds,
        layers=first.layers,
        convolution=first.convolution,
        left=np.sqrt(left.mean((1, 2))),
        interval=np.sqrt(_interval(left)),
        floor=np.sqrt(np.concatenate([part.floor for part in parts], axis=1).max(1)),
        bound=np.concatenate([part.bound for part in parts], axis=1).max(1),
        output=np.sqrt(np.concatenate([part.output for part in parts], axis=2).mean((1, 2))),
        kl=np.concatenate([part.kl for part in parts], axis=1).mean(1),
        depth=measure_contraction(model, reading, epsilon=epsilon, seeds=seeds, batch_size=batch_size),
        measured_on=reading.measured_on(seed=seeds[0]),
    )


def _interval(left: np.ndarray) -> np.ndarray:
    """95 % interval of the mean of `left` (n, S, W, K + 1) by bootstrap over seeds and windows, (n, K + 1, 2)."""
    n, seeds, windows, after = left.shape
    if seeds * windows == 1:
        return np.full((n, after, 2), np.nan)
    rng = np.random.default_rng(0)
    a = drawn_windows(windows, rng) / windows
    b = rng.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
    means = (np.einsum("rw,rs,swk->rk", a, b, of_layer, optimize=True) for of_layer in left)
    return np.stack([np.quantile(drawn, [0.025, 0.975], axis=0).T for drawn in means])


class _Run:
    """One run over some windows, with blocks of rows: clean; one per seed; the probes of `Transition`; one per layer.

    In all but the last kind every layer reads what it reads in the clean row. Arrays, for n layers with a state, S
    seeds, W windows, K tokens: `energy` is `‖δ‖²` of the state's error (n, S, W, K + 1), `output` is `‖y' − y‖²/‖y‖²`
    of the layer's output (n, S, W, K), `kl` (n, W, K), `floor` and `bound` (n, W, K + 1).
    """

    def __init__(
        self, reading: Reading, ids: torch.Tensor, first_window: int, seeds: tuple[int, ...], epsilon: float
    ) -> None:
        self._reading, self._ids, self._first_window = reading, ids, first_window
        self._seeds, self._epsilon = seeds, epsilon
        self._steps = min(STEPS, ids.shape[1] // 2)

    def followed(self) -> _Run:
        model, structure = self._reading.model, self._reading.structure
        start = self._ids.shape[1] - self._steps
        given = first_cache(model, structure)
        try:
            output = model(self._ids[:, :start], use_cache=True, **given, **only_last(model, 1))
            carried = cache_of(model, output) or given
            cache = next(iter(carried.values()), None)
            states = carried_states(structure, cache)
            self._begin(states)
            select_rows(structure, cache, torch.arange(len(self._ids)).repeat(self._blocks))
            self._move(states)
            hold = [(layer, self._hold) for layer in structure.layers]
            note = [(structure.layers[index], partial(self._note, at)) for at, index in enumerate(states)]
            for k in range(1, self._steps + 1):
                with hooked(before=hold, after=note):
                    logits = self._step(carried, start + k - 1)
                self._look(k, states, logits)
        finally:
            forget_states(structure)
        return self

    def _begin(self, states: dict[int, Carried]) -> None:
        windows, seeds, n = len(self._ids), len(self._seeds), len(states)
        self.layers = tuple(states)
        self.convolution = tuple(state.convolution for state in states.values())
        self._maps = [Transition(state.read(), self._epsilon) for state in states.values()]
        self._probes = max(transition.probes for transition in self._maps)
        held = 1 + seeds + self._probes
        self._blocks = held + n
        # For each row, the row whose inputs it reads.
        rows = torch.arange(windows * self._blocks)
        self._source = torch.where(rows < windows * held, rows % windows, rows).to(self._ids.device)
        self._leaving: dict[int, np.ndarray] = {}  # relative error of the output of each layer, at the last token
        self.energy = np.zeros((n, seeds, windows, self._steps + 1))
        self.output = np.zeros((n, seeds, windows, self._steps))
        self.kl = np.zeros((n, windows, self._steps))
        self.floor = np.zeros((n, windows, self._steps + 1))
        self.bound = np.ones((n, windows, self._steps + 1))

    def _move(self, states: dict[int, Carried]) -> None:
        """Move the state of every layer, in the cache, in the rows of seeds, of probes and of its own layer."""
        windows, seeds = len(self._ids), len(self._seeds)
        for at, state in enumerate(states.values()):
            blocks = list(state.read().clone().split(windows))
            clean = widen(blocks[0])
            flat = clean.flatten(1)
            for j, seed in enumerate(self._seeds):
                moved = clean + (self._epsilon * direction(flat, self._first_window, seed)).view_as(clean)
                blocks[1 + j] = moved.to(blocks[0].dtype)
            own = 1 + seeds + self._probes + at
            blocks[own] = blocks[1]
            for j, probe in enumerate(self._maps[at].moves()):
                blocks[1 + seeds + j] = blocks[0] + probe
            state.write(torch.cat(blocks))
            self._look_at_state(0, at, state)

    def _step(self, carried: dict[str, Any], t: int) -> torch.Tensor:
        """Logits (rows × vocabulary) after token t, in every row."""
        model = self._reading.model
        ids = self._ids[:, t : t + 1].repeat(self._blocks, 1)
        logits: torch.Tensor = model(ids, use_cache=True, **carried, **position(model, ids, t)).logits[:, -1]
        return logits

    def _hold(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the rows of every floating tensor that a layer is called with by those of their source rows."""

        def held(value: Any) -> Any:
            rows = isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == len(self._source)
            return value.index_select(0, self._source.to(value.device)) if rows and value.is_floating_point() else value

        return tuple(map(held, args)), {name: held(value) for name, value in kwargs.items()}

    def _note(self, at: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        windows, seeds = len(self._ids), len(self._seeds)
        blocks = widen(hidden_of(output)).flatten(1).split(windows)
        clean = token_energy(blocks[0])
        moved = torch.stack([token_energy(block - blocks[0]) for block in blocks[1 : 1 + seeds]])
        self._leaving[at] = torch.where(clean > 0, moved / clean, 0).cpu().numpy()

    def _look(self, k: int, states: dict[int, Carried], logits: torch.Tensor) -> None:
        windows = len(self._ids)
        log_p = lift(logits).log_softmax(-1).split(windows)
        require_finite(self._reading.structure, self._ids, self._reading.batch.text, log_p[0])
        for at, state in enumerate(states.values()):
            self._look_at_state(k, at, state)
            self.output[at, :, :, k - 1] = self._leaving[at]
            other = log_p[len(log_p) - len(states) + at]
            self.kl[at, :, k - 1] = (log_p[0].exp() * (log_p[0] - other)).sum(-1).cpu().numpy()

    def _look_at_state(self, k: int, at: int, state: Carried) -> None:
        windows, seeds = len(self._ids), len(self._seeds)
        blocks = [lift(block) for block in state.read().split(windows)]
        errors = torch.stack([block - blocks[0] for block in blocks[1 : 1 + seeds]])
        self.energy[at, :, :, k] = token_energy(errors.flatten(2)).cpu().numpy()
        begun = self.energy[at, :, :, 0].mean(0)
        unit = torch.finfo(widen(state.read()).dtype).eps if k else 0.0
        self.floor[at, :, k] = unit**2 * token_energy(blocks[0].flatten(1)).cpu().numpy() / np.maximum(begun, 1e-300)
        probes = [block - blocks[0] for block in blocks[1 + seeds : 1 + seeds + self._probes]]
        if state.convolution:
            self.bound[at, :, k] = float(k < state.read().shape[-1])
        else:
            self.bound[at, :, k] = self._maps[at].bound(k, probes, errors)
