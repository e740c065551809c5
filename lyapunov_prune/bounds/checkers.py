"""One checker per theorem: compares measured errors with the bound of the theorem.

Every checker is arithmetic on float64 numbers and does not depend on a model. `error` is the computed error, within
`rounding` of the exact one (`u` of lean/LyapunovPrune/Checker.lean); the computed bound is within `v`, a few parts in
10¹¹ of itself. A check passes when `error ≤ bound + (u + v)`: by `no_false_alarm` a true bound raises no alarm, and by
`violation_is_real` an alarm is a violation of the true bound. A passed check is a measurement on its inputs, not a
proof.

Norms must come from `linalg.certified_norm`, because a norm that is too small raises false alarms.
"""

from __future__ import annotations

from typing import Unpack

import numpy as np

from lyapunov_prune.bounds.bound_check import BoundCheck, MatrixPlace, Numbers, as_array, worst_check
from lyapunov_prune.errors import LyapunovPruneError

_STREAM = "residual stream"  # the name of a check without a matrix


def retrieval_bound(error: Numbers, distance: Numbers, weight_norm: float, **place: Unpack[MatrixPlace]) -> BoundCheck:
    """Theorem 1, `retrieval_bound`: `‖W x − W x'‖ ≤ ‖W‖ ‖x − x'‖` for each input.

    `error` and `distance` have one entry per input. `distance` may be a cache radius (`retrieval_bound_of_le`).
    """
    return worst_check("retrieval_bound", error, weight_norm * as_array(distance), **place)


def sparse_activation_bound(
    error: Numbers, size: Numbers, residual_norm: float, **place: Unpack[MatrixPlace]
) -> BoundCheck:
    """Theorem 2, `sparse_activation_bound`: `‖W x − S x‖ ≤ ‖W − S‖ ‖x‖`, for any `S`.

    `size` is `‖x‖`, one entry per input; `residual_norm` is a certified `‖W − S‖` (`error_le_of_certified_norm`).
    """
    return worst_check("sparse_activation_bound", error, residual_norm * as_array(size), **place)


def interpolation_bound(
    error: Numbers, size: Numbers, residual_norm: float, **place: Unpack[MatrixPlace]
) -> BoundCheck:
    """Theorem 3, `interpolation_bound`: `‖W x − L x‖ ≤ ‖R‖ ‖x‖` for a low-rank `L` and `R = W − L`."""
    return worst_check("interpolation_bound", error, residual_norm * as_array(size), **place)


def composition_bound(
    error: Numbers,
    size: Numbers,
    radius: Numbers,
    *,
    weight_norm: float,
    sparse_norm: float,
    low_rank_norm: float,
    **place: Unpack[MatrixPlace],
) -> BoundCheck:
    """Theorem 4, `composition_bound`: `‖W x − L x'‖ ≤ ‖W‖ ε + ‖W − S‖ ‖x'‖ + ‖S − L‖ ‖x'‖`.

    `size` is `‖x'‖` and `radius` the `ε ≥ ‖x − x'‖` of each input; the norms are certified. By Theorem 6,
    `adaptive_monotonicity`, upper bounds of the radius and of the norms give an upper bound.
    """
    bound = weight_norm * as_array(radius) + (sparse_norm + low_rank_norm) * as_array(size)
    return worst_check("composition_bound", error, bound, **place)


def trajectory_error_le(
    errors: Numbers, growth: Numbers, local: Numbers, *, unit: float = 2.0**-24
) -> tuple[BoundCheck, ...]:
    """Equation (1), `trajectory_error_le`: `‖h_n − h'_n‖ ≤ composedBound K δ ‖h_0 − h'_0‖ n`, for `n = 1 … N`.

    `N = 2` is Theorem 11, `nonlinear_composition_bound`.

    `errors` is (N + 1,), `growth` K (N,) with `‖f_k(h_k) − f_k(h'_k)‖ ≤ K_k ‖h_k − h'_k‖`, `local` δ (N,) with
    `‖f_k(h'_k) − g_k(h'_k)‖ ≤ δ_k`. A K measured along a trajectory is valid for that trajectory only, so the checks
    are marked as estimates. `unit` is the relative rounding of the measured norms.
    """
    e, K, delta = as_array(errors), as_array(growth), as_array(local)
    if len(e) != len(K) + 1 or len(K) != len(delta):
        raise LyapunovPruneError(f"{len(e)} errors, {len(K)} growth factors and {len(delta)} local errors do not fit")
    checks, bound = [], float(e[0])
    for n in range(len(K)):
        bound = float(K[n] * bound + delta[n])
        rounding = 8 * (n + 2) * unit * bound
        checks.append(
            worst_check(
                "trajectory_error_le",
                e[n + 1 : n + 2],
                np.array([bound]),
                rounding=rounding,
                matrix=_STREAM,
                layer=n,
                estimate=True,
            )
        )
    return tuple(checks)


def lyapunov_contraction_bound(errors: Numbers, gamma: float, local: float, *, unit: float = 2.0**-24) -> BoundCheck:
    """Theorem 8, `lyapunov_contraction_bound`: `e_n ≤ γⁿ e_0 + δ (1 − γⁿ)/(1 − γ)` for `n = 1 … N`.

    `errors` is (N + 1,); `gamma` bounds every growth factor and `local` every local error. Both are measured, so the
    check is an estimate. Raises LyapunovPruneError unless `0 ≤ γ < 1`, the hypothesis of the theorem.
    """
    if not 0 <= gamma < 1:
        raise LyapunovPruneError(f"Theorem 8 needs 0 ≤ γ < 1, not {gamma:.4g}; use trajectory_error_le")
    e = as_array(errors)
    power = gamma ** np.arange(1, len(e), dtype=np.float64)
    bound = power * e[0] + local * (1 - power) / (1 - gamma)
    rounding = 8 * len(e) * unit * bound
    return worst_check("lyapunov_contraction_bound", e[1:], bound, rounding=rounding, matrix=_STREAM, estimate=True)


def residual_growth_contraction(
    relative_energy: Numbers, error_growth: Numbers, state_growth: Numbers, *, unit: float = 2.0**-24
) -> tuple[BoundCheck, ...]:
    """Theorem 9, `residual_growth_contraction`: where the state grows faster than the error, `V' < V`.

    Takes the energies of a ContractionProfile: `relative_energy` (L + 1,), `error_growth` a and `state_growth` g (L,).
    Returns one check for each layer with `a < g` and none for the others: `V' ≤ (a/g) V` (`relative_error_le`), which
    is below V.
    """
    V, a, g = as_array(relative_energy), as_array(error_growth), as_array(state_growth)
    return tuple(
        worst_check(
            "residual_growth_contraction",
            V[k + 1 : k + 2],
            a[k] / g[k] * V[k : k + 1],
            rounding=16 * unit * V[k],
            matrix=f"layer {k}",
            layer=k,
            estimate=True,
        )
        for k in np.flatnonzero(a < g).tolist()
    )


def preln_contraction_sufficient(
    rho: Numbers,
    kappa: Numbers,
    align: Numbers,
    gain: Numbers,
    *,
    unit: float = 2.0**-40,
    matrix: str = _STREAM,
    layer: int | None = None,
) -> BoundCheck | None:
    """Theorem 10, `preln_contraction_sufficient`: if `(1 + κ)² < 1 + 2 align gain + gain²`, ρ is below one.

    For vectors (`preln_layer_contracts`): a layer maps the state `h` to `h + s` and the error `e` to `e + d`, with
    `kappa = ‖d‖/‖e‖`, `align` the cosine of `h` and `s`, `gain = ‖s‖/‖h‖`, and `rho` the ratio of `‖e‖²/‖h‖²` after the
    layer to that before; one entry per input. Checks `ρ ≤ (1 + κ)² / (1 + 2 align gain + gain²)`, which is below one,
    on the inputs that satisfy the condition; returns None if there are none. `κ` is measured, so the check is an
    estimate. `unit` is the relative rounding of the four numbers: where the condition holds the state grows, so `‖h‖²`
    and `‖s‖²` are at most a few times `‖h + s‖²`, and the rounding of the sum stays below 32 units.
    """
    growth_of_error = np.square(1 + as_array(kappa))
    growth_of_state = 1 + 2 * as_array(align) * as_array(gain) + np.square(as_array(gain))
    met = growth_of_error < growth_of_state
    if not met.any():
        return None
    bound = growth_of_error[met] / growth_of_state[met]
    where: MatrixPlace = {"rounding": 32 * unit * bound, "matrix": matrix, "layer": layer}
    return worst_check("preln_contraction_sufficient", as_array(rho)[met], bound, **where, estimate=True)


def merged_projection(error: Numbers, **place: Unpack[MatrixPlace]) -> BoundCheck:
    """Theorem `merged_projection`: `W₂ (W₁ x + b₁) + b₂ = (W₂ W₁) x + (W₂ b₁ + b₂)` for each input.

    `error` is the norm of the difference of the two sides, which is zero up to `rounding`.
    """
    return worst_check("merged_projection", error, np.zeros_like(as_array(error)), **place)


def activation_replacement_bound(
    error: Numbers, change: Numbers, out_norm: float, **place: Unpack[MatrixPlace]
) -> BoundCheck:
    """Theorem `activation_replacement_bound`: `‖(W₂ σ(a) + b₂) − (W₂ τ(a) + b₂)‖ ≤ ‖W₂‖ ‖σ(a) − τ(a)‖`.

    `error` is that of the output of a feed-forward block and `change = ‖σ(a) − τ(a)‖` that of its hidden vector, one
    entry per input; `out_norm` is a certified `‖W₂‖`. In a gated block `a` is the pair (g, u) of the gate and the up
    projection, and `σ(a) = σ(g) ⊙ u`: the theorem only uses the values of σ and τ.
    """
    return worst_check("activation_replacement_bound", error, out_norm * as_array(change), **place)


def opNorm_merged_le(
    stretch: Numbers, size: Numbers, out_norm: float, in_norm: float, **place: Unpack[MatrixPlace]
) -> BoundCheck:
    """Theorem `opNorm_merged_le`: `‖W₂ W₁‖ ≤ ‖W₂‖ ‖W₁‖`.

    `stretch` is `‖W x‖` of the merged `W` and `size` is `‖x‖`, one entry per input; the two norms are certified. With a
    top right singular vector of `W` as input this is the theorem itself.
    """
    return worst_check("opNorm_merged_le", stretch, out_norm * in_norm * as_array(size), **place)
