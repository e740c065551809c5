"""How long errors in recurrent states last: what is left by layer and by token, with intervals and a bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lyapunov_prune.profiles.contraction_profile import ABOVE_FLOOR, ContractionProfile
from lyapunov_prune.results.arrays import require_array, require_fields, require_fitting, require_layers
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import ROWS, MeasuredOn, Result
from lyapunov_prune.results.wording import bars, ranges

_SLOW = 0.99  # a bound above this says nothing


@dataclass(frozen=True)
class PersistenceProfile(Result):
    """What is left of an error δ in the state of a layer, 0 … K tokens later. Float64; n layers with a state.

    `left(k) = √(mean (‖δ_k‖² / ‖δ_0‖²))` over windows and seeds, with the inputs of the layer unchanged.
    `rho = left(k)^(1/k)` at the last k at which the error is above rounding: the geometric mean of the factors per
    token. It is a ratio of norms; compare it with √ρ along depth, whose ρ is a ratio of energies. It is 0 for a
    convolution, which keeps its last inputs and nothing else.

    A measurement along one text, except `bound`, which holds for an error in any direction on that text.
    """

    epsilon: float
    seeds: tuple[int, ...]
    layers: tuple[int, ...]
    convolution: tuple[bool, ...]  # whether a layer keeps a convolution's inputs, and no recurrent state
    left: np.ndarray  # (n, K + 1)
    interval: np.ndarray  # 95 % of `left`, bootstrap over windows and seeds, (n, K + 1, 2); NaN for one of each
    floor: np.ndarray  # `left` of one unit of rounding of the state, (n, K + 1)
    bound: np.ndarray  # largest norm over windows of the map from δ_0 to δ_k, (n, K + 1); NaN where it is not known
    output: np.ndarray  # √(mean ‖y' − y‖²/‖y‖²) of what leaves the layer, at tokens 1 … K, (n, K)
    kl: np.ndarray  # mean KL of the predictions when this layer alone is moved, nats, (n, K)
    depth: ContractionProfile  # of the same text
    measured_on: MeasuredOn

    def __post_init__(self) -> None:
        of = "persistence profile"
        n, after = len(self.layers), np.shape(self.left)[-1] if np.ndim(self.left) else 0
        require_fitting(n > 0 and after > 1, f"{of}: no layer, or no token to follow an error over")
        require_layers(f"{of}, layers", self.layers, self.measured_on.model.num_layers)
        require_fields(of, self, (n, after), "left", "floor")
        require_array(f"{of}, left before any token", self.left[:, 0], (n,), least=1, most=1)
        require_fields(of, self, (n, after, 2), "interval", finite=False)
        require_fields(of, self, (n, after), "bound", finite=False)
        require_fields(of, self, (n, after - 1), "output")
        require_fields(of, self, (n, after - 1), "kl", least=-np.inf)
        require_array(f"{of}, convolution", np.array(self.convolution), (n,))

    @property
    def tokens(self) -> int:
        """K, the number of tokens over which errors are followed."""
        return self.left.shape[1] - 1

    @property
    def reached(self) -> np.ndarray:
        """The last k up to which `left` is at least 10 × the rounding floor, (n,) int."""
        clear = self.left**2 > ABOVE_FLOOR * self.floor**2
        return np.where(clear.all(1), self.tokens, np.argmin(clear, axis=1) - 1).clip(0)

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
        return _half_lives(self.left)

    @property
    def half_life_interval(self) -> np.ndarray:
        """95 % interval of `half_life`, (n, 2): where the limits of `interval` reach one half."""
        return np.stack([_half_lives(self.interval[..., side]) for side in (0, 1)], -1)

    def _per_token(self, left: np.ndarray) -> np.ndarray:
        at = self.reached
        rates = left[np.arange(len(at)), at] ** (1 / np.maximum(at, 1))
        return np.where(np.array(self.convolution) | (at == 0), 0.0, rates)

    @property
    def order(self) -> list[int]:
        """Indices into `layers`, by falling half-life and then by falling ρ."""
        return [int(i) for i in np.lexsort((self.rho, self.half_life))[::-1]]

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "layer": self.layers,
                "state": ["convolution" if convolution else "recurrent" for convolution in self.convolution],
                "half_life": self.half_life,
                "low": self.half_life_interval[:, 0],
                "high": self.half_life_interval[:, 1],
                "rho_time": self.rho,
                "rho_low": self.rho_interval[:, 0],
                "rho_high": self.rho_interval[:, 1],
                "left_at_end": self.left[:, -1],
                "bound_at_end": self.bound[:, -1],
                "output_error": self.output[:, 0],
                "kl": self.kl.sum(1),
                "sqrt_rho_depth": np.sqrt(self.depth.rho[list(self.layers)]),
            }
        )

    def headline(self) -> str:
        return (
            f"Errors in recurrent states (ε = {self.epsilon:g}, {len(self.seeds)} seeds, {self.tokens} tokens): "
            f"half-lives {self._count(self.half_life.min())} to {self._count(self.half_life.max())} tokens\n"
            f"{self.measured_on.line()}"
        )

    def answer(self) -> list[str]:
        recurrent = [at for at in self.order if not self.convolution[at]]
        lines = [self._described("longest", recurrent[0])] if recurrent else []
        if len(recurrent) > 1:
            lines.append(self._described("shortest", recurrent[-1]))
        layers = self.measured_on.model.num_layers
        if recurrent:
            lives = np.full(layers, np.nan)
            lives[[self.layers[at] for at in recurrent]] = np.minimum(self.half_life, self.tokens)[recurrent]
            lines.append(f"Half-life by layer, up to {self.tokens} tokens: {bars(lives)}")
        lines += self._bounded()
        if short := [at for at, convolution in enumerate(self.convolution) if convolution]:
            where, last = ranges(self.layers[at] for at in short), int(self.reached[short].max()) + 1
            lines.append(f"Layers {where} carry the last inputs of a convolution only: an error is gone after {last}.")
        if without := set(range(layers)) - set(self.layers):
            lines.append(f"Without a recurrent state: layers {ranges(without)}; an error in a key or value stays.")
        worst = int(self.kl.sum(1).argmax())
        lines.append(
            f"An error of {self.epsilon:.3g} of the state costs most in layer {self.layers[worst]}: "
            f"{self.kl[worst].sum():.2g} nats of KL over {self.tokens} tokens."
        )
        return lines

    def _described(self, which: str, at: int) -> str:
        low, high = self.half_life_interval[at]
        between = f" (95 % interval {self._count(low)} to {self._count(high)})" if np.isfinite(low) else ""
        return (
            f"An error in the state lasts {which} in layer {self.layers[at]}: half of it for "
            f"{self._count(self.half_life[at])} tokens{between}; {self.left[at, -1]:.2g} of it is left after "
            f"{self.tokens} (ρ along time {self.rho[at]:.3g} a token)."
        )

    def _count(self, tokens: float) -> str:
        return f"{tokens:.3g}" if np.isfinite(tokens) else f"more than {self.tokens}"

    def _bounded(self) -> list[str]:
        recurrent = ~np.array(self.convolution)
        last = self.bound[:, -1]
        known = recurrent & np.isfinite(last)
        lines = []
        if known.any():
            worst = int(np.where(known, last, -np.inf).argmax())
            lines.append(
                f"In whatever direction, at most {last[worst]:.3g} of an error is left after {self.tokens} tokens of "
                f"this text (layer {self.layers[worst]}); below {_SLOW:g} in {int((last[known] < _SLOW).sum())} of "
                f"{int(known.sum())} layers: the norm of the recurrence, which is linear in its state."
            )
        if (recurrent & ~known).any():
            unknown = [i for i, lacks in zip(self.layers, recurrent & ~known, strict=True) if lacks]
            lines.append(
                f"No bound for layers {ranges(unknown)}: their recurrence has another form, or rounds too much."
            )
        return lines

    def brief(self) -> pd.DataFrame:
        """The layers with the longest half-lives, and those with the shortest."""
        order = self.order
        few = ROWS // 2
        rows = order if len(order) <= ROWS else [*order[:few], *order[-few:]]
        columns = ["layer", "state", "half_life", "low", "high", "rho_time", "left_at_end", "bound_at_end", "kl"]
        return self.to_frame()[[*columns, "sqrt_rho_depth"]].iloc[rows]


def _half_lives(left: np.ndarray) -> np.ndarray:
    found = np.full(len(left), np.inf)
    for at, curve in enumerate(left):
        below = np.flatnonzero(curve <= 0.5)
        if np.isnan(curve).any():
            found[at] = np.nan
        elif len(below):
            k = max(below[0], 1)
            before, after = np.log(max(2 * curve[k - 1], 1.0)), np.log(max(2 * curve[k], 1e-300))
            found[at] = k - 1 + before / (before - after)
    return found
