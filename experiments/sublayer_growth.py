"""Growth of error and state through attention and through the MLP, the factors of a layer's ρ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.anatomy import KINDS, between_branches, require_some
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.profiles.propagation import WindowSums, difference_sums, listed, require_moved
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

_Growth = Annotated[np.ndarray, Per("layer", len(KINDS), finite=False)]


@dataclass(frozen=True)
class SublayerGrowth(Result):
    """Growth through attention and MLP of every layer, float64, (L, 2); NaN for a missing sublayer.

    `error_growth = Σ‖e after‖² / Σ‖e before‖²` and `state_growth` likewise, for the residual stream before and after a
    sublayer is added; their ratio is the sublayer's ρ, and the product over the sublayers gives the layer's values.
    `token_rho` is the ratio of `mean_t ‖e‖²/‖h‖²`. The only sublayer of a layer has the layer's own growth; a layer
    whose sublayers cannot be separated has NaN. Measured along one text, not a bound.
    """

    epsilon: float
    seeds: tuple[int, ...]
    error_growth: _Growth
    state_growth: _Growth
    token_rho: _Growth
    measured_on: MeasuredOn

    @property
    def rho(self) -> np.ndarray:
        """ρ of attention and MLP under energy pooling, (L, 2)."""
        return self.error_growth / self.state_growth

    def to_frame(self) -> pd.DataFrame:
        columns = {"layer": np.arange(len(self.rho))}
        for k, kind in enumerate(KINDS):
            columns |= {
                f"{kind}_error": self.error_growth[:, k],
                f"{kind}_state": self.state_growth[:, k],
                f"{kind}_rho": self.rho[:, k],
                f"{kind}_rho_token": self.token_rho[:, k],
            }
        return pd.DataFrame(columns)

    def headline(self) -> str:
        lines = [
            f"Growth through attention and MLP (ε = {self.epsilon:g}, {len(self.seeds)} seeds), ρ = error / state",
            self.measured_on.line(),
        ]
        whole = np.where(np.isnan(self.rho).all(1), np.nan, np.nanprod(self.rho, axis=1))
        if not np.isnan(whole).all():
            lines.append(self._explained("least", int(np.nanargmin(whole))))
            lines.append(self._explained("most", int(np.nanargmax(whole))))
        return "\n".join(lines)

    def _explained(self, which: str, layer: int) -> str:
        parts = [
            f"{kind} {rho:.3g} (error × {error:.3g}, state × {state:.3g})"
            for kind, rho, error, state in zip(
                KINDS, self.rho[layer], self.error_growth[layer], self.state_growth[layer], strict=True
            )
            if not np.isnan(rho)
        ]
        return f"The {which} ρ, {np.nanprod(self.rho[layer]):.3g} of layer {layer}: {', '.join(parts)}"


@runs_model
def sublayer_growth(
    model: InMemory, batch: Readable, *, epsilon: float = 1e-2, seeds: Sequence[int] = range(4), batch_size: int = 1
) -> SublayerGrowth:
    """Follow the perturbation of `measure_contraction` through the sublayers of every layer.

    Structural sensitivity, §6.2, eq. 4, attributes the amplification of GPT-2 Medium's last layer to its attention. The
    stream is also observed between the sublayers, in the same forward.

    Raises LyapunovPruneError naming the class for layers with parallel attention and MLP, which have no state between
    them, and if no layer has separable sublayers; otherwise like `measure_contraction`.
    """
    reading = read(model, batch)
    kind = type(reading.model).__name__
    structure, seeds = reading.structure, listed(seeds)
    anatomy = reading.anatomy
    require_some(reading.decoder, anatomy)
    places = between_branches(reading.decoder, anatomy, " whose growth could be measured; measure whole layers")
    between = {layer: entry for layer, (_, entry) in places.items()}

    def sums(first: int, ids: torch.Tensor) -> WindowSums:
        return difference_sums(structure, ids, first, seeds, epsilon, between)

    total = WindowSums.join(dealt(reading, batch_size, sums, "growth by sublayer"))
    if len(total.state) != structure.num_layers + 1 + len(between):
        raise LyapunovPruneError(f"{kind} does not run every sublayer once; measure whole layers")
    energies = total.error.sum((-2, -1)), total.state.sum(-1), total.energy("token")
    require_moved(energies[0][0], epsilon)
    growth = np.full((len(energies), structure.num_layers, len(KINDS)), np.nan)
    at = 0
    for layer, found in anatomy.items():
        for kind in found.whole:
            growth[:, layer, KINDS.index(kind)] = [values[at + 1] / values[at] for values in energies]
            at += 1
        at += not found.whole  # a layer without separable sublayers is one step
    return SublayerGrowth(epsilon, seeds, growth[0], growth[1], growth[2], reading.measured_on(seed=seeds[0]))
