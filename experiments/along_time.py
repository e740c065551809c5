"""ρ along time: how much of an error in the state of a Mamba-2 layer is left after 1 … 64 more tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.logits import position
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.linalg import lift, widen
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.profiles.contraction_profile import ABOVE_FLOOR
from lyapunov_prune.profiles.propagation import RESAMPLES, direction, drawn_windows

STEPS = 64


@dataclass(frozen=True)
class AlongTime:
    """What is left of an error δ in the state of a layer, 0 … K tokens later. Float64; n layers with a state.

    `left(k) = √(mean (‖δ_k‖² / ‖δ_0‖²))` over windows and seeds, with the inputs of the layer unchanged.
    `rho = left(k)^(1/k)` at the last k at which the error is above rounding: the geometric mean of the factors per
    token. It is a ratio of norms; compare it with √ρ along depth, whose ρ is a ratio of energies.

    A measurement along one text, except `bound`, which holds for an error in any direction on that text.
    """

    layers: tuple[int, ...]
    left: np.ndarray  # (n, K + 1)
    interval: np.ndarray  # 95 % of `left`, bootstrap over windows and seeds, (n, K + 1, 2)
    floor: np.ndarray  # `left` of one unit of rounding of the state, (n, K + 1)
    bound: np.ndarray  # largest norm over windows of the map from δ_0 to δ_k, (n, K + 1)

    @property
    def rho(self) -> np.ndarray:
        """The factor per token, (n,)."""
        return self._per_token(self.left)

    @property
    def rho_interval(self) -> np.ndarray:
        """95 % interval of `rho`, (n, 2)."""
        return np.stack([self._per_token(self.interval[..., side]) for side in (0, 1)], -1)

    @property
    def half_life(self) -> np.ndarray:
        """Tokens until half of the error is left, (n,), by log-linear interpolation; infinite if more than K."""
        found = np.full(len(self.left), np.inf)
        for at, curve in enumerate(self.left):
            below = np.flatnonzero(curve <= 0.5)
            if len(below):
                before, after = np.log(2 * curve[below[0] - 1]), np.log(max(2 * curve[below[0]], 1e-300))
                found[at] = below[0] - 1 + before / (before - after)
        return found

    def _per_token(self, left: np.ndarray) -> np.ndarray:
        clear = self.left**2 > ABOVE_FLOOR * self.floor**2
        last = np.where(clear.all(1), left.shape[1] - 1, np.argmin(clear, axis=1) - 1).clip(0)
        return np.where(last == 0, 0.0, left[np.arange(len(last)), last] ** (1 / np.maximum(last, 1)))


@torch.no_grad()
def along_time(
    model: Decoder, batch: TokenBatch, *, epsilon: float = 1e-2, seeds: Sequence[int] = range(4)
) -> AlongTime:
    """Measure how long an error in the recurrent state of each Mamba-2 layer lasts.

    In every window the model reads all but the last K tokens (K = 64, or half the window if that is less). Then the
    state S of each layer is moved by `ε ‖S‖ u`, with u uniform on the sphere over all its entries, drawn per window and
    seed, and the last K tokens are read one at a time, with and without the error. A layer's own state never reaches
    its own input, so every layer is given the inputs of the clean row: what is left of the error depends on its
    recurrence alone, and all layers are measured in one pass.

    With its inputs unchanged a state follows `S_{t+1} = a_t ⊙ S_t + b_t`, so that an error follows
    `δ_{t+k} = M_k ⊙ δ_t` with `M_k = a_{t+k-1} ⊙ … ⊙ a_t`, whatever the state. In one more row every entry is moved by
    a large constant c, which changes the later state by `c M_k`; the largest entry of M_k, and an allowance for
    rounding, bounds what is left of any error. Raises LyapunovPruneError where M_k does not give what became of every
    random error.
    """
    reading = read(model, batch)
    parts = [_Window(reading, ids, number, seeds, epsilon) for number, ids in enumerate(reading.windows(1))]
    energy = np.stack([part.energy for part in parts], axis=2)  # layers, seeds, windows, K + 1
    left = energy / energy[..., :1]
    rng = np.random.default_rng(0)
    _, drawn, windows, _ = left.shape
    a = drawn_windows(windows, rng) / windows
    b = rng.multinomial(drawn, np.full(drawn, 1 / drawn), RESAMPLES) / drawn
    means = (np.einsum("rw,rs,swk->rk", a, b, of_layer, optimize=True) for of_layer in left)
    return AlongTime(
        layers=parts[0].layers,
        left=np.sqrt(left.mean((1, 2))),
        interval=np.sqrt(np.stack([np.quantile(mean, [0.025, 0.975], axis=0).T for mean in means])),
        floor=np.sqrt(np.max([part.floor for part in parts], axis=0)),
        bound=np.max([part.bound for part in parts], axis=0),
    )


class _Window:
    """One window, with rows: clean, one per seed, one moved far. Every layer reads what it reads in the clean row.

    For n layers with a state, S seeds, K tokens: `energy` is `‖δ‖²` (n, S, K + 1), `floor` and `bound` (n, K + 1).
    """

    def __init__(self, reading: Reading, ids: torch.Tensor, number: int, seeds: Sequence[int], epsilon: float) -> None:
        model: Any = reading.model
        steps = min(STEPS, ids.shape[1] // 2)
        start = ids.shape[1] - steps
        cache = model(ids[:, :start], use_cache=True).past_key_values
        cache.reorder_cache(torch.zeros(2 + len(seeds), dtype=torch.long))
        kept = {i: each.recurrent_states for i, each in enumerate(cache.layers) if hasattr(each, "recurrent_states")}
        self.layers, self._epsilon = tuple(kept), epsilon
        self.energy = np.zeros((len(kept), len(seeds), steps + 1))
        self.floor, self.bound = np.zeros((2, len(kept), steps + 1))
        self._far: list[float] = []
        self._begun: list[torch.Tensor] = []
        for at, states in enumerate(kept.values()):
            clean = widen(states[0][:1])
            flat = clean.flatten(1)
            moved = [clean + (epsilon * direction(flat, number, seed)).view_as(clean) for seed in seeds]
            # A power of two as large as the state, so that adding it and dividing by it rounds little.
            self._far.append(2.0 ** float(clean.abs().max().log2().ceil()))
            states[0] = torch.cat([clean, *moved, clean + self._far[at]]).to(states[0].dtype)
            self._look(0, at, states[0])
        hold = [(layer, _hold) for layer in reading.structure.layers]
        for k in range(1, steps + 1):
            t = start + k - 1
            step = ids[:, t : t + 1].repeat(2 + len(seeds), 1)
            with hooked(before=hold):
                model(step, use_cache=True, past_key_values=cache, **position(model, step, t))
            for at, states in enumerate(kept.values()):
                self._look(k, at, states[0])

    def _look(self, k: int, at: int, state: torch.Tensor) -> None:
        S = lift(state)
        errors, product = S[1:-1] - S[0], (S[-1] - S[0]) / self._far[at]
        self.energy[at, :, k] = errors.flatten(1).square().sum(1).cpu()
        self.bound[at, k] = 1
        if k == 0:
            self._begun.append(errors)
            return
        self.floor[at, k] = torch.finfo(state.dtype).eps ** 2 * S[0].square().sum() / self.energy[at, :, 0].mean()
        unit = max(torch.finfo(state.dtype).eps, torch.finfo(torch.float32).eps)  # Mamba computes in float32
        self.bound[at, k] = float(product.abs().max()) + 4 * k * unit
        off = (product * self._begun[at] - errors).flatten(1).norm(dim=1)
        if not (off <= 20 * k * unit / self._epsilon * self._begun[at].flatten(1).norm(dim=1)).all():
            raise LyapunovPruneError(f"layer {self.layers[at]} has another recurrence than Mamba-2; leave it out")


def _hold(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace the rows of every floating tensor that a layer is called with by those of the clean row."""

    def held(value: Any) -> Any:
        rows = isinstance(value, torch.Tensor) and value.ndim > 1 and value.is_floating_point()
        return value[:1].repeat(len(value), *[1] * (value.ndim - 1)) if rows else value

    return tuple(map(held, args)), {name: held(value) for name, value in kwargs.items()}
