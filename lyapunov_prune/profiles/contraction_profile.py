"""The measured contraction factors under both poolings, with intervals and their reliability."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import numpy as np

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.profiles.propagation import Energies
from lyapunov_prune.results.arrays import require_array, require_fitting
from lyapunov_prune.results.axes import Loose, Per, PerBoundary
from lyapunov_prune.results.frames import columns, pd
from lyapunov_prune.results.result import MeasuredOn, Result

Pooling = Literal["energy", "token"]
# A relative energy this many times the rounding floor (ten times in amplitude) is not noise.
ABOVE_FLOOR = 100.0
# If ρ at ε and at ε / 10 differ by more than this, ρ depends on ε.
LINEAR = 0.1
# Tolerance of a share: its sum and the sum of the whole are rounded in different orders.
_WHOLE = 1 + 1e-6


_Share = Annotated[np.ndarray, Per("layer+1", most=_WHOLE, finite=False)]  # NaN where no error is left to share


@dataclass(frozen=True)
class ContractionProfile(Result):
    """Contraction of every layer of a model. Arrays are float64; `L` layers, boundaries `0 … L`.

    `ρ_l = V_{l+1} / V_l`, with `V_l = Σ_t ‖e_l,t‖² / Σ_t ‖h_l,t‖²` under energy pooling and `mean_t ‖e_l,t‖² /
    ‖h_l,t‖²` under token pooling. Both are kept; `pooling` selects the one for `rho`, `rho_interval` and
    `relative_energy`, and `pooled` changes it.

    A measurement along the trajectories of one text, not a bound and not a Lipschitz constant.
    """

    pooling: Pooling
    method: str
    epsilon: float
    seeds: tuple[int, ...]
    energies: Annotated[dict[str, np.ndarray], Per("layer+1")]  # V, by pooling
    intervals: Annotated[dict[str, np.ndarray], Per("layer", 2, finite=False)]  # 95 % of rho, by bootstrap
    error_growth: Loose  # Σ‖e_{l+1}‖² / Σ‖e_l‖²
    state_growth: Loose  # Σ‖h_{l+1}‖² / Σ‖h_l‖²
    floor: PerBoundary  # V of one unit of rounding (jvp: of the change it makes); zeros in old files
    sink_state_share: _Share  # share of Σ‖h_l‖² in the largest token of each window
    sink_error_share: _Share  # share of Σ‖e_l‖² in those same tokens
    norm_growth: Annotated[np.ndarray, Per("window", finite=False)]  # K = Π_l ‖h_{l+1}‖/‖h_l‖, one value per window
    measured_on: MeasuredOn
    worst_growth: float | None = None  # Π_l max over windows of ‖h_{l+1}‖/‖h_l‖ ≥ max K; None in old files
    windows: Energies | None = None  # per window, for the bootstrap; None in old files
    # ρ at ε divided by ρ at ε / 10, (L,), on part of one window, or on all windows if the layers route tokens. NaN if
    # ρ at ε / 10 is rounding; None for jvp and in old files
    linearity: Annotated[np.ndarray | None, Per("layer", finite=False)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        both = set(self.energies) == set(self.intervals) == set(get_args(Pooling))
        require_fitting(both, "contraction profile: energies and intervals are of both poolings")
        if self.windows is not None:
            boundaries, count = self.floor.size, self.norm_growth.size
            require_array("windows, state", self.windows.state, (boundaries, count))
            for name in ("error", "relative"):
                require_array(f"windows, {name}", getattr(self.windows, name), (boundaries, len(self.seeds), count))

    @property
    def relative_energy(self) -> np.ndarray:
        """V at every boundary, (L + 1,)."""
        return self.energies[self.pooling]

    @property
    def rho(self) -> np.ndarray:
        """ρ of every layer, (L,); NaN or infinite where there is no error left to grow."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self.relative_energy[1:] / self.relative_energy[:-1]

    @property
    def rho_interval(self) -> np.ndarray:
        """95 % interval of ρ, (L, 2): percentile bootstrap over windows and seeds.

        With a single window only the seeds vary; with a single seed and window the interval is NaN.
        """
        return self.intervals[self.pooling]

    def drawn(self) -> np.ndarray | None:
        """Bootstrap samples of ρ over windows and seeds, (draws, L); None for a single window."""
        if self.windows is None or self.windows.state.shape[-1] == 1:
            return None
        return self.windows.drawn(self.pooling)

    @property
    def above_floor(self) -> np.ndarray:
        """Whether each ratio uses energies of at least 100 × the rounding floor, (L,) bool."""
        return self.above(ABOVE_FLOOR)

    def above(self, times: float) -> np.ndarray:
        """Whether each ratio uses energies of at least `times` the rounding floor, (L,) bool."""
        clear = self.energies["energy"] > times * self.floor
        return clear[:-1] & clear[1:]

    @property
    def below_floor(self) -> tuple[int, ...]:
        """The layers that are not `above_floor`: their ratio is rounding, not a measurement."""
        return tuple(int(i) for i in np.flatnonzero(~self.above_floor))

    @property
    def not_linear(self) -> tuple[int, ...]:
        """The layers whose ρ changes by more than 10 % at ε / 10, so that it is not a derivative."""
        if self.linearity is None:
            return ()
        return tuple(int(i) for i in np.flatnonzero(np.abs(np.log(self.linearity)) > np.log1p(LINEAR)))

    def require_above_floor(self) -> None:
        """Raise LyapunovPruneError when every ρ is `below_floor`, because decisions by it would be noise."""
        if not self.above_floor.any():
            raise below_floor_error("this profile", self.measured_on.dtype)

    @property
    def contracting(self) -> tuple[int, int]:
        """Number of the `L − 1` inter-layer transitions that contract (ρ < 1), counted as in the paper."""
        transitions = self.rho[:-1] if len(self.rho) > 1 else self.rho
        return int((transitions < 1).sum()), len(transitions)

    @property
    def downstream_amplification(self) -> np.ndarray:
        """`A_l = Π_{k > l} ρ_k`, (L,); 1 for the last layer."""
        return self.relative_energy[-1] / self.relative_energy[1:]

    @property
    def pooling_disagrees(self) -> tuple[int, ...]:
        """Layers whose two poolings differ more than twofold: a few tokens carry the energy there."""
        ratio = np.abs(np.log2(self.pooled("energy").rho / self.pooled("token").rho))
        return tuple(int(i) for i in np.flatnonzero(ratio > 1))

    @checked
    def pooled(self, pooling: Pooling) -> ContractionProfile:
        """The same measurement under another pooling."""
        return replace(self, pooling=pooling)

    def to_frame(self) -> pd.DataFrame:
        other: Pooling = "token" if self.pooling == "energy" else "energy"
        return pd.DataFrame(
            {
                "layer": np.arange(len(self.rho)),
                "rho": self.rho,
                "low": self.rho_interval[:, 0],
                "high": self.rho_interval[:, 1],
                f"rho_{other}": self.pooled(other).rho,
                **columns(self, "error_growth", "state_growth"),
                "sink_share": self.sink_state_share[1:],
                "above_floor": self.above_floor,
            }
        )

    def headline(self) -> str:
        contracting, transitions = self.contracting
        K = self.norm_growth.mean()
        spread = f" (CV {self.norm_growth.std() / K:.2g})" if len(self.norm_growth) > 1 else ""
        lines = [
            f"Contraction ({self.method}, {self.pooling} pooling, ε = {self.epsilon:g}, {len(self.seeds)} seeds): "
            f"{contracting} of {transitions} transitions contract; K = {K:.4g}{spread}",
            self.measured_on.line(),
        ]
        if self.pooling_disagrees:
            shares = ", ".join(
                f"{i} ({self.sink_state_share[i + 1]:.0%} of the state's energy in one token per window)"
                for i in self.pooling_disagrees
            )
            lines.append(f"Poolings disagree more than twofold at layer {shares}")
        if self.not_linear:
            lines.append(
                f"ρ differs by more than {LINEAR:.0%} at ε = {self.epsilon / 10:g} at layer "
                f"{', '.join(map(str, self.not_linear))}: it depends on ε; use method jvp, or a "
                "smaller ε (no help where tokens are routed to experts: a flipped route has the same effect at any ε)"
            )
        if self.below_floor:
            lines.append(
                f"{len(self.below_floor)} ratios are not well above rounding in {self.measured_on.dtype} forwards: "
                f"use float32{' or a larger ε' if self.method == 'difference' else ''}"
            )
        return "\n".join(lines)


def below_floor_error(of: str, dtype: str) -> LyapunovPruneError:
    return LyapunovPruneError(
        f"every rho of {of} lies below the rounding floor of {dtype}; give --dtype float32, profile with a larger "
        "--epsilon, or use --criterion bi or --allocation atp"
    )


def dtype_note(measured_on: Iterable[MeasuredOn]) -> str:
    """A warning for a decision measured in half precision; empty otherwise.

    In bfloat16 the plans for 2 of 8 layers differed from those in float32 for half of twelve small models.
    """
    halves = sorted({on.dtype for on in measured_on} & {"bfloat16", "float16"})
    return f"; measured in {', '.join(halves)}, and float32 may choose others (--dtype float32)" if halves else ""


def floor_note(below_floor: tuple[int, ...]) -> str:
    """A warning for a decision by ρ that names the layers whose ρ is rounding; empty if there are none."""
    return f"; rho lies below the rounding floor at layer {', '.join(map(str, below_floor))}" if below_floor else ""
