"""The contraction factor ρ: how each layer shrinks or grows a relative error.

`propagation` follows the error; this module turns its sums into a `ContractionProfile`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from lyapunov_prune.arguments import Count, Positive, Seeds
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.forward.rounding import roughness
from lyapunov_prune.models.decoder import Streamable, runs_model
from lyapunov_prune.models.device import differentiable
from lyapunov_prune.models.quantised import UNSEEN_ROUNDING
from lyapunov_prune.profiles.contraction_profile import ABOVE_FLOOR, ContractionProfile, Pooling, below_floor_error
from lyapunov_prune.profiles.propagation import WindowSums, difference_sums, jvp_moved, jvp_sums, listed, require_moved

Derivative = Literal["difference", "jvp"]
# If one window is below this, further windows will not lift the whole above the threshold.
FAR_BELOW = ABOVE_FLOOR / 10
# The floor needs an order of magnitude only, so part of one window is enough unless layers route tokens.
FLOOR_TOKENS = 128


@runs_model
def measure_contraction(
    model: Streamable,
    batch: Readable,
    *,
    epsilon: Positive = 1e-2,
    seeds: Seeds = range(4),
    method: Derivative = "difference",
    pooling: Pooling = "energy",
    batch_size: Count = 1,
) -> ContractionProfile:
    """Measure the contraction factor ρ of every layer (structural sensitivity, §6.2, eq. 2 and 4).

    Every token of the state before layer 0 is perturbed by `ε ‖h_0,t‖ u_t`, with `u_t` uniform on the sphere, drawn per
    token, window and seed; the error `e_l = h̃_l − h_l` is then followed through the layers. `method="jvp"` follows the
    forward-mode derivative in the same directions instead (`ε → 0`), which does not suffer from the rounding of a
    difference; it is scaled by ε, so that `V` is comparable.

    `floor` is V of a second run, perturbed by one unit of the coarsest dtype that the layers round to
    (`forward.rounding`): float32 for most float64 models, whose norms are computed in float32, and bfloat16 at least
    for packed weights, whose kernels may round to it. For `jvp` it is V of the change of the derivative when the state
    moves by such a unit (`jvp_moved`).

    `linearity` is ρ at ε divided by ρ at ε / 10, for the first seed, on the part of one window that the floor is
    measured on: for sharp attention, ε = 1e-2 is far from the derivative.

    If the layers route tokens (experts, or sparse attention; `forward.rounding`), the few tokens near a tie dominate: a
    token whose route flips moves by the same amount at any ε. Part of a window may contain no such token, so floor and
    linearity then use all windows and seeds.

    That ρ is error growth divided by state growth, and that the factors multiply to the end-to-end ratio, are the Lean
    theorems `rho_eq_error_growth_div_state_growth` and `relative_energy_telescope`; the numbers are measurements.

    One forward carries `batch_size × (1 + seeds)` rows (difference; twice as many if layers route tokens) or
    `batch_size × seeds` rows (jvp).

    Raises NonFiniteError naming the first layer with NaN or infinite activations, and LyapunovPruneError for ids
    outside the vocabulary, windows longer than the context, an epsilon below rounding, or a model without forward-mode
    derivatives.
    """
    reading = read(model, batch)
    structure = reading.structure
    seeds = listed(seeds)
    if method == "jvp" and model.packed:
        raise LyapunovPruneError("the kernels of packed weights give no reliable derivatives; use method difference")
    stretch = reading.windows(batch_size)[0][:1, :FLOOR_TOKENS]
    rough = roughness(structure, stretch, reading.model.dtype)
    unit = torch.finfo(rough.coarsest).eps
    if model.packed:
        unit = max(unit, UNSEEN_ROUNDING)

    def join(run: Callable[..., WindowSums], *how: Any) -> WindowSums:
        each = dealt(reading, batch_size, lambda first, ids: run(structure, ids, first, *how), "contraction")
        return WindowSums.join(each)

    def moved_by(first: int, ids: torch.Tensor) -> np.ndarray:
        return jvp_moved(structure, ids, first, unit)

    trial, n = None, len(seeds)
    if method == "difference" and rough.chooses:
        trial = join(difference_sums, (*seeds, *seeds, seeds[0]), (*[epsilon] * n, *[epsilon / 10] * n, unit))
        total = trial.copies(slice(n))
    elif method == "difference":
        total = join(difference_sums, seeds, epsilon)
        trial = difference_sums(structure, stretch, 0, (seeds[0],) * 3, (epsilon, epsilon / 10, unit))
    else:
        with differentiable(structure.backbone):
            total = join(jvp_sums, seeds, epsilon)
            tried = dealt(reading, batch_size, moved_by, "rounding") if rough.chooses else [moved_by(0, stretch)]
            moved, energy = np.sum(tried, axis=0)
    floor, linearity = (epsilon**2 * moved / energy, None) if trial is None else _floor_and_linearity(trial)
    return _profile(reading, total, floor, linearity, pooling, method, epsilon, seeds)


def _profile(
    reading: Reading,
    total: WindowSums,
    floor: np.ndarray,
    linearity: np.ndarray | None,
    pooling: Pooling,
    method: Derivative,
    epsilon: float,
    seeds: tuple[int, ...],
) -> ContractionProfile:
    """The profile of the sums `total`; raises LyapunovPruneError if ε moved no state."""
    state, error = total.state.sum(-1), total.error.sum((-2, -1))
    require_moved(error[0], epsilon)
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
        norm_growth=np.sqrt(total.state[-1] / total.state[0]),
        measured_on=reading.measured_on(seed=seeds[0]),
        linearity=linearity,
        worst_growth=float(np.sqrt((total.state[1:] / total.state[:-1]).max(-1).prod())),
        windows=total.energies(),
    )


def _floor_and_linearity(trial: WindowSums) -> tuple[np.ndarray, np.ndarray]:
    """V of one unit of rounding, (L + 1,), and the ratio of ρ at ε to ρ at ε / 10, (L,); NaN below the floor.

    The last copy in `trial` is perturbed by the unit, the first half of the others by ε and the second half by ε / 10.
    """
    V = trial.error.sum(-1) / trial.state.sum(-1, keepdims=True)
    half = V.shape[1] // 2
    whole, tenth, floor = V[:, :half].mean(1), V[:, half:-1].mean(1), V[:, -1]
    clear = tenth > ABOVE_FLOOR * floor
    far = clear[1:] & clear[:-1]
    linearity = np.full(len(far), np.nan)
    linearity[far] = whole[1:][far] / whole[:-1][far] / (tenth[1:][far] / tenth[:-1][far])
    return floor, linearity


def require_above_rounding(reading: Reading) -> None:
    """`require_above_floor` on the first window and one seed, to refuse half precision and packed weights early.

    Raises only if every energy is below `FAR_BELOW` times the floor; the whole profile decides the cases in between.
    """
    decoder = reading.decoder
    if torch.finfo(decoder.model.dtype).bits >= 32 and not decoder.packed:
        return
    trial = measure_contraction(decoder, reading.batch.ids[:1], seeds=(0,))
    if not trial.above(FAR_BELOW).any():
        raise below_floor_error("the first window", "packed" if decoder.packed else trial.measured_on.dtype)
