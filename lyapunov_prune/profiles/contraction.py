"""The contraction factor: how each layer shrinks or grows a relative error that travels through it.

The error is followed by `propagation`; this module turns its sums into factors, intervals and a result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.forward.rounding import coarsest_rounding
from lyapunov_prune.models.quantised import UNSEEN_ROUNDING, is_packed, require_derivatives
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.profiles.propagation import (
    Energies,
    WindowSums,
    difference_sums,
    jvp_floor,
    jvp_sums,
    require_moved,
    required,
)
from lyapunov_prune.progress import track
from lyapunov_prune.results.arrays import require_array
from lyapunov_prune.results.result import MeasuredOn, Result

Pooling = Literal["energy", "token"]
Derivative = Literal["difference", "jvp"]
# A relative energy this many times the rounding floor (ten in amplitude) is measured, not noise.
ABOVE_FLOOR = 100.0
# Where one window stays even below this, others will not lift the whole above the other.
FAR_BELOW = ABOVE_FLOOR / 10
# The floor needs an order of magnitude, so a stretch of one window is enough.
FLOOR_TOKENS = 128
# ρ at ε and at ε / 10 that differ by more than this are no property of the layer alone.
LINEAR = 0.1
# A share, summed in another order than the whole.
_WHOLE = 1 + 1e-6


@dataclass(frozen=True)
class ContractionProfile(Result):
    """Contraction of every layer of a model. Arrays are float64; `L` layers, boundaries `0 … L`.

    `ρ_l = V_{l+1} / V_l`, with `V_l = Σ_t ‖e_l,t‖² / Σ_t ‖h_l,t‖²` under energy pooling and
    `mean_t ‖e_l,t‖² / ‖h_l,t‖²` under token pooling. Both are kept; `pooling` says which one `rho`,
    `rho_interval` and `relative_energy` speak of, and `pooled` changes it.

    A measurement along the trajectories of one text: no bound and no Lipschitz constant.
    """

    pooling: str
    method: str
    epsilon: float
    seeds: tuple[int, ...]
    energies: dict[str, np.ndarray]  # pooling -> V, (L + 1,)
    intervals: dict[str, np.ndarray]  # pooling -> 95 % bootstrap interval of rho, (L, 2)
    error_growth: np.ndarray  # Σ‖e_{l+1}‖² / Σ‖e_l‖², (L,)
    state_growth: np.ndarray  # Σ‖h_{l+1}‖² / Σ‖h_l‖², (L,)
    floor: np.ndarray  # V of one unit of the coarsest rounding, for jvp how far that moves it, (L + 1,); zeros before
    sink_state_share: np.ndarray  # share of Σ‖h_l‖² in the largest token of each window, (L + 1,)
    sink_error_share: np.ndarray  # share of Σ‖e_l‖² in those same tokens, (L + 1,)
    norm_growth: np.ndarray  # K = Π_l ‖h_{l+1}‖/‖h_l‖, one value a window
    measured_on: MeasuredOn
    worst_growth: float | None = None  # Π_l max over windows of ‖h_{l+1}‖/‖h_l‖ ≥ max K; None in files of before
    windows: Energies | None = None  # of each window, to draw them anew; None in files of before
    # ρ at ε over ρ at ε / 10, on a stretch of one window, (L,): NaN where the smaller is rounding; None for jvp, before
    linearity: np.ndarray | None = None

    def __post_init__(self) -> None:
        L = self.measured_on.model.num_layers
        _require_pooling(self.pooling)
        if not set(self.energies) == set(self.intervals) == set(get_args(Pooling)):
            raise LyapunovPruneError(
                "a contraction profile has energies and intervals of both poolings; measure it again"
            )
        of = "contraction profile"
        for pooling in get_args(Pooling):
            require_array(f"{of}, {pooling} energies", self.energies[pooling], (L + 1,))
            require_array(f"{of}, {pooling} intervals", self.intervals[pooling], (L, 2), finite=False)
        require_array(f"{of}, floor", self.floor, (L + 1,))
        # NaN or infinite where no error is left to grow or to share.
        require_array(f"{of}, error_growth", self.error_growth, (L,), finite=False)
        require_array(f"{of}, state_growth", self.state_growth, (L,), finite=False)
        require_array(f"{of}, sink_state_share", self.sink_state_share, (L + 1,), most=_WHOLE, finite=False)
        require_array(f"{of}, sink_error_share", self.sink_error_share, (L + 1,), most=_WHOLE, finite=False)
        count = self.norm_growth.size
        require_array(f"{of}, norm_growth", self.norm_growth, (count,), finite=False)
        if self.windows is not None:
            shapes = {"state": (L + 1, count), **dict.fromkeys(("error", "relative"), (L + 1, len(self.seeds), count))}
            for name, shape in shapes.items():
                require_array(f"{of}, {name} of the windows", getattr(self.windows, name), shape)
        if self.linearity is not None:
            require_array(f"{of}, linearity", self.linearity, (L,), finite=False)

    @property
    def relative_energy(self) -> np.ndarray:
        """V before the first layer and after each, (L + 1,)."""
        return self.energies[self.pooling]

    @property
    def rho(self) -> np.ndarray:
        """ρ of every layer, (L,); NaN or infinite where no error is left to grow."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self.relative_energy[1:] / self.relative_energy[:-1]

    @property
    def rho_interval(self) -> np.ndarray:
        """95 % interval of ρ, (L, 2): percentile bootstrap over windows and seeds.

        With a single window only the seeds vary, and with a single seed and window the interval is NaN.
        """
        return self.intervals[self.pooling]

    def drawn(self) -> np.ndarray | None:
        """ρ of windows and seeds that are drawn anew, (draws, L); None where there is one window."""
        if self.windows is None or self.windows.state.shape[-1] == 1:
            return None
        return self.windows.drawn(self.pooling)

    @property
    def above_floor(self) -> np.ndarray:
        """Which ratios rest on energies at least 100 × the rounding floor, (L,) of bool."""
        return self._above(ABOVE_FLOOR)

    def _above(self, times: float) -> np.ndarray:
        clear = self.energies["energy"] > times * self.floor
        return clear[:-1] & clear[1:]

    @property
    def below_floor(self) -> tuple[int, ...]:
        """The layers whose ratio is not `above_floor`: rounding, and no measurement."""
        return tuple(int(i) for i in np.flatnonzero(~self.above_floor))

    @property
    def not_linear(self) -> tuple[int, ...]:
        """The layers whose ρ is another by more than 10 % at ε / 10: their ρ is of this ε, and no derivative."""
        if self.linearity is None:
            return ()
        return tuple(int(i) for i in np.flatnonzero(np.abs(np.log(self.linearity)) > np.log1p(LINEAR)))

    def require_above_floor(self) -> None:
        """Raise LyapunovPruneError when every ρ is `below_floor`: to go by it would be to go by noise."""
        if not self.above_floor.any():
            raise _below_floor("this profile", self.measured_on.dtype)

    @property
    def contracting(self) -> tuple[int, int]:
        """How many of the `L − 1` inter-layer transitions contract (ρ < 1), as the paper counts them."""
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

    def pooled(self, pooling: Pooling) -> ContractionProfile:
        """The same measurement under the other pooling."""
        _require_pooling(pooling)
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
                "error_growth": self.error_growth,
                "state_growth": self.state_growth,
                "sink_share": self.sink_state_share[1:],
                "above_floor": self.above_floor,
            }
        )

    def headline(self) -> str:
        contracting, transitions = self.contracting
        spread = self.norm_growth.std() / self.norm_growth.mean()
        lines = [
            f"Contraction ({self.method}, {self.pooling} pooling, ε = {self.epsilon:g}, {len(self.seeds)} seeds): "
            f"{contracting} of {transitions} transitions contract; "
            f"K = {self.norm_growth.mean():.4g} (CV {spread:.2g})",
            self.measured_on.line(),
        ]
        if self.pooling_disagrees:
            shares = ", ".join(
                f"{i} ({self.sink_state_share[i + 1]:.0%} of the state's energy in one token a window)"
                for i in self.pooling_disagrees
            )
            lines.append(f"Poolings disagree more than twofold at layer {shares}")
        if self.not_linear:
            lines.append(
                f"ρ is another by more than {LINEAR:.0%} at ε = {self.epsilon / 10:g} at layer "
                f"{', '.join(map(str, self.not_linear))}: it is of this ε alone; use a smaller ε or method jvp"
            )
        if self.below_floor:
            lines.append(
                f"{len(self.below_floor)} ratios are not well above rounding in {self.measured_on.dtype} forwards: "
                f"use float32{' or a larger ε' if self.method == 'difference' else ''}"
            )
        return "\n".join(lines)


@checked
@in_eval_mode
@torch.no_grad()
def measure_contraction(
    model: PreTrainedModel,
    batch: Readable,
    *,
    epsilon: float = 1e-2,
    seeds: Iterable[int] = range(4),
    method: Derivative = "difference",
    pooling: Pooling = "energy",
    batch_size: int = 1,
) -> ContractionProfile:
    """Measure the contraction factor ρ of every layer (structural sensitivity, §6.2, eq. 2 and 4).

    Every token of the state before layer 0 is moved by `ε ‖h_0,t‖ u_t`, `u_t` uniform on the sphere, one
    draw a token, window and seed; the error `e_l = h̃_l − h_l` is then followed through the layers.
    `method="jvp"` follows the forward-mode derivative in the same directions instead (`ε → 0`), where
    rounding of a difference plays no part; it is scaled by ε, so that `V` compares.

    `floor` is V of a second run, moved by one unit of the coarsest dtype that the layers round to
    (`coarsest_rounding`): float32 for most families in float64, as their norms are taken there, and of packed weights
    bfloat16 at least, to which kernels round unseen. Of `jvp` it is the V of the change of the derivative where the
    state is moved by such a unit (`jvp_floor`).

    `linearity` is ρ at ε over ρ at ε / 10, both by the first seed on the stretch of one window that the floor is
    measured on: where attention is sharp, 1e-2 is far from the derivative.

    That ρ is the quotient of error growth and state growth, and that the factors multiply to the
    end-to-end ratio, are the Lean theorems `rho_eq_error_growth_div_state_growth` and
    `relative_energy_telescope`; the numbers themselves are measurements.

    One forward carries `batch_size × (1 + seeds)` rows (difference) or `batch_size × seeds` (jvp).
    Raises NonFiniteError naming the first layer with NaN or infinite activations, and LyapunovPruneError
    for ids outside the vocabulary, a context too long, an epsilon that rounding swallows, or a model without
    forward-mode derivatives.
    """
    reading = read(model, batch, streamed=True)
    structure = reading.structure
    seeds = required(seeds, epsilon, batch_size)
    if method not in get_args(Derivative):
        raise LyapunovPruneError(f"unknown method {method!r}; give difference or jvp")
    _require_pooling(pooling)
    if method == "jvp":
        require_derivatives(model)

    run = jvp_sums if method == "jvp" else difference_sums
    windows = reading.windows(batch_size)
    sums = [run(structure, ids, k * batch_size, seeds, epsilon) for k, ids in enumerate(track(windows, "contraction"))]
    total = WindowSums.join(sums)
    state, error = total.state.sum(-1), total.error.sum((-2, -1))
    require_moved(error[0], epsilon, model.dtype)

    stretch = windows[0][:1, :FLOOR_TOKENS]
    unit = torch.finfo(coarsest_rounding(structure, stretch, model.dtype)).eps
    if is_packed(model):
        unit = max(unit, UNSEEN_ROUNDING)
    linearity = None
    if method == "jvp":
        floor = jvp_floor(structure, stretch, epsilon, unit)
    else:
        three = difference_sums(structure, stretch, 0, (0, 0, 0), (unit, epsilon, epsilon / 10))
        floor, whole, tenth = (three.error.sum(-1) / three.state.sum(-1, keepdims=True)).T
        clear = tenth > ABOVE_FLOOR * floor
        far = clear[1:] & clear[:-1]
        linearity = np.full(structure.num_layers, np.nan)
        linearity[far] = whole[1:][far] / whole[:-1][far] / (tenth[1:][far] / tenth[:-1][far])

    growth = np.sqrt(total.state[-1] / total.state[0])
    return ContractionProfile(
        pooling=pooling,
        method=method,
        epsilon=epsilon,
        seeds=seeds,
        energies={p: total.energy(p) for p in ("energy", "token")},
        intervals={p: total.interval(p) for p in ("energy", "token")},
        error_growth=error[1:] / error[:-1],
        state_growth=state[1:] / state[:-1],
        floor=floor,
        sink_state_share=total.peak_state.sum(-1) / state,
        sink_error_share=total.peak_error.sum((-2, -1)) / error,
        norm_growth=growth,
        measured_on=reading.measured_on(seed=seeds[0]),
        linearity=linearity,
        worst_growth=float(np.sqrt((total.state[1:] / total.state[:-1]).max(-1).prod())),
        windows=total.energies(),
    )


def require_above_rounding(model: PreTrainedModel, batch: Readable, epsilon: float = 1e-2) -> None:
    """`require_above_floor` of the first window by one seed: half precision and packed weights are refused first.

    Only where no energy is `FAR_BELOW` times the floor. What lies between is for the whole profile to say.
    """
    reading = read(model, batch, streamed=True)
    if torch.finfo(model.dtype).bits >= 32 and not is_packed(model):
        return
    trial = measure_contraction(model, reading.batch.ids[:1], epsilon=epsilon, seeds=(0,))
    if not trial._above(FAR_BELOW).any():
        raise _below_floor("the first window", "packed" if is_packed(model) else trial.measured_on.dtype)


def _below_floor(of: str, dtype: str) -> LyapunovPruneError:
    return LyapunovPruneError(
        f"every rho of {of} lies below the rounding floor of {dtype} forwards; measure with --dtype float32, a larger "
        "--epsilon or profile --derivative jvp, or go by something else (--criterion bi, --allocation atp)"
    )


def dtype_note(measured_on: Iterable[MeasuredOn]) -> str:
    """What a decision says that rests on forwards in half precision; empty for none.

    In bfloat16 the plans for 2 of 8 layers of half of twelve small models were not those of float32.
    """
    halves = sorted({on.dtype for on in measured_on} & {"bfloat16", "float16"})
    return f"; measured in {', '.join(halves)}, and float32 may choose others (--dtype float32)" if halves else ""


def floor_note(below_floor: tuple[int, ...]) -> str:
    """What a decision that goes by ρ says of the layers whose ρ is rounding; empty for none."""
    return f"; rho lies below the rounding floor at layer {', '.join(map(str, below_floor))}" if below_floor else ""


def _require_pooling(pooling: str) -> None:
    if pooling not in get_args(Pooling):
        raise LyapunovPruneError(f"unknown pooling {pooling!r}; give energy or token")
