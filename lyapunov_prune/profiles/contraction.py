"""The contraction factor: how each layer shrinks or grows a relative error that travels through it.

The error is followed by `propagation`; this module turns its sums into the numbers of a `ContractionProfile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Seed, checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.forward.rounding import roughness
from lyapunov_prune.models.quantised import UNSEEN_ROUNDING, is_packed, require_derivatives
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.profiles.contraction_profile import (
    ABOVE_FLOOR,
    ContractionProfile,
    Pooling,
    below_floor_error,
    require_pooling,
)
from lyapunov_prune.profiles.propagation import (
    WindowSums,
    difference_sums,
    jvp_moved,
    jvp_sums,
    require_moved,
    required,
)
from lyapunov_prune.progress import track

Derivative = Literal["difference", "jvp"]
# Where one window stays even below this, others will not lift the whole above the other.
FAR_BELOW = ABOVE_FLOOR / 10
# The floor needs an order of magnitude, so a stretch of one window is enough where nothing is chosen.
FLOOR_TOKENS = 128


@checked
@in_eval_mode
@torch.no_grad()
def measure_contraction(
    model: PreTrainedModel,
    batch: Readable,
    *,
    epsilon: float = 1e-2,
    seeds: Iterable[Seed] = range(4),
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
    (`forward.rounding`): float32 for most families in float64, as their norms are taken there, and of packed weights
    bfloat16 at least, to which kernels round unseen. Of `jvp` it is the V of the change of the derivative where the
    state is moved by such a unit (`jvp_moved`).

    `linearity` is ρ at ε over ρ at ε / 10, both by the first seed on the stretch of one window that the floor is
    measured on: where attention is sharp, 1e-2 is far from the derivative.

    Where the layers choose experts (or the tokens that attention looks at; `forward.rounding`), few tokens near a tie
    decide: one whose route flips is moved by as much at any ε, and has nearly all of the energy of the error. No
    stretch shows that, so there floor and linearity are those of all windows and seeds.

    That ρ is the quotient of error growth and state growth, and that the factors multiply to the
    end-to-end ratio, are the Lean theorems `rho_eq_error_growth_div_state_growth` and
    `relative_energy_telescope`; the numbers themselves are measurements.

    One forward carries `batch_size × (1 + seeds)` rows (difference), twice as many where the layers choose, or
    `batch_size × seeds` (jvp).
    Raises NonFiniteError naming the first layer with NaN or infinite activations, and LyapunovPruneError
    for ids outside the vocabulary, a context too long, an epsilon that rounding swallows, or a model without
    forward-mode derivatives.
    """
    reading = read(model, batch, streamed=True)
    structure = reading.structure
    seeds = required(seeds, epsilon, batch_size)
    if method not in get_args(Derivative):
        raise LyapunovPruneError(f"unknown method {method!r}; give difference or jvp")
    require_pooling(pooling)
    if method == "jvp":
        require_derivatives(model)

    windows = reading.windows(batch_size)
    stretch = windows[0][:1, :FLOOR_TOKENS]
    rough = roughness(structure, stretch, model.dtype)
    unit = torch.finfo(rough.coarsest).eps
    if is_packed(model):
        unit = max(unit, UNSEEN_ROUNDING)

    def join(run: Callable[..., WindowSums], *how: Any) -> WindowSums:
        each = enumerate(track(windows, "contraction"))
        return WindowSums.join([run(structure, ids, k * batch_size, *how) for k, ids in each])

    linearity = None
    if method == "jvp":
        total = join(jvp_sums, seeds, epsilon)
        tried = enumerate(windows if rough.chooses else [stretch])
        moved, energy = np.sum([jvp_moved(structure, ids, k * batch_size, unit) for k, ids in tried], axis=0)
        floor = epsilon**2 * moved / energy
    elif rough.chooses:
        n = len(seeds)
        trial = join(difference_sums, (*seeds, *seeds, seeds[0]), (*[epsilon] * n, *[epsilon / 10] * n, unit))
        total = trial.copies(slice(n))
        floor, linearity = _floor_and_linearity(trial)
    else:
        total = join(difference_sums, seeds, epsilon)
        trial = difference_sums(structure, stretch, 0, (seeds[0],) * 3, (epsilon, epsilon / 10, unit))
        floor, linearity = _floor_and_linearity(trial)
    state, error = total.state.sum(-1), total.error.sum((-2, -1))
    require_moved(error[0], epsilon, model.dtype)

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


def _floor_and_linearity(trial: WindowSums) -> tuple[np.ndarray, np.ndarray]:
    """V of one unit of rounding (L + 1,), and ρ at ε over ρ at ε / 10 (L,), NaN where that is rounding.

    The copies of `trial` are moved by ε, as many by ε / 10, and the last by the unit.
    """
    V = trial.error.sum(-1) / trial.state.sum(-1, keepdims=True)
    half = V.shape[1] // 2
    whole, tenth, floor = V[:, :half].mean(1), V[:, half:-1].mean(1), V[:, -1]
    clear = tenth > ABOVE_FLOOR * floor
    far = clear[1:] & clear[:-1]
    linearity = np.full(len(far), np.nan)
    linearity[far] = whole[1:][far] / whole[:-1][far] / (tenth[1:][far] / tenth[:-1][far])
    return floor, linearity


def require_above_rounding(model: PreTrainedModel, batch: Readable, epsilon: float = 1e-2) -> None:
    """`require_above_floor` of the first window by one seed: half precision and packed weights are refused first.

    Only where no energy is `FAR_BELOW` times the floor. What lies between is for the whole profile to say.
    """
    reading = read(model, batch, streamed=True)
    if torch.finfo(model.dtype).bits >= 32 and not is_packed(model):
        return
    trial = measure_contraction(model, reading.batch.ids[:1], epsilon=epsilon, seeds=(0,))
    if not trial.above(FAR_BELOW).any():
        raise below_floor_error("the first window", "packed" if is_packed(model) else trial.measured_on.dtype)
