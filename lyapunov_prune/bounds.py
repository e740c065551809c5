"""One checker per theorem: numbers that were measured against the bound that the theorem sets them.

Every checker is arithmetic on float64 numbers and knows no model. `error` is what was computed, within
`rounding` of the truth (`u` of lean/LyapunovPrune/Checker.lean); the computed bound is within `v`, a few
parts in 10¹¹ of itself. A check holds when `error ≤ bound + (u + v)`: by `no_false_alarm` a true bound
raises no alarm, by `violation_is_real` an alarm is a violation of the true bound. A check that holds is a
measurement on its inputs, no proof.

Norms must come from `linalg.certified_norm`: an estimate from below raises false alarms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import token_energy
from lyapunov_prune.results import Result

# Relative rounding of a bound: a norm of a vector of up to 2¹³ entries, and some products.
_BOUND_ROUNDING = 2.0**-37
# Tokens whose logits are formed at once.
_TOKENS = 64

Numbers = npt.ArrayLike


@dataclass(frozen=True)
class BoundCheck:
    """One theorem on one matrix: the worst of `inputs` inputs, that is the largest error / (bound + margin).

    `estimate` marks a bound whose hypothesis was only measured (growth along one trajectory).
    """

    theorem: str
    matrix: str
    layer: int | None
    error: float
    bound: float
    margin: float  # u + v: what rounding may account for
    inputs: int
    estimate: bool = False

    @property
    def slack(self) -> float:
        """How far the error stays below the bound."""
        return self.bound - self.error

    @property
    def ratio(self) -> float:
        """Error / bound; 1 is a bound attained."""
        return self.error / self.bound if self.bound > 0 else (0.0 if self.error == 0 else np.inf)

    @property
    def holds(self) -> bool:
        return self.error <= self.bound + self.margin

    def __str__(self) -> str:
        verb = "holds for" if self.holds else "is VIOLATED by"
        numbers = f"error {self.error:.6g}, bound {self.bound:.6g} (± {self.margin:.2g})"
        return f"{self.theorem} {verb} {self.matrix}: {numbers}"

    def with_more(self, other: BoundCheck | None) -> BoundCheck:
        """The worse of two checks of one theorem on one matrix, with the inputs of both."""
        if other is None:
            return self
        worst = max(self, other, key=lambda c: (not c.holds, c.ratio))
        return replace(worst, inputs=self.inputs + other.inputs)


def retrieval_bound(
    error: Numbers,
    distance: Numbers,
    weight_norm: float,
    *,
    rounding: Numbers = 0.0,
    matrix: str = "",
    layer: int | None = None,
) -> BoundCheck:
    """Theorem 1, `retrieval_bound`: `‖W x − W x'‖ ≤ ‖W‖ ‖x − x'‖` for each input.

    `error` and `distance` (or the radius of a cache, `retrieval_bound_of_le`) have one entry an input.
    """
    return _worst("retrieval_bound", matrix, layer, error, weight_norm * _array(distance), rounding)


def sparse_activation_bound(
    error: Numbers,
    size: Numbers,
    residual_norm: float,
    *,
    rounding: Numbers = 0.0,
    matrix: str = "",
    layer: int | None = None,
) -> BoundCheck:
    """Theorem 2, `sparse_activation_bound`: `‖W x − S x‖ ≤ ‖W − S‖ ‖x‖`, for any `S`.

    `size` is `‖x‖`, one entry an input; `residual_norm` a certified `‖W − S‖`
    (`error_le_of_certified_norm`).
    """
    return _worst("sparse_activation_bound", matrix, layer, error, residual_norm * _array(size), rounding)


def interpolation_bound(
    error: Numbers,
    size: Numbers,
    residual_norm: float,
    *,
    rounding: Numbers = 0.0,
    matrix: str = "",
    layer: int | None = None,
) -> BoundCheck:
    """Theorem 3, `interpolation_bound`: `‖W x − L x‖ ≤ ‖R‖ ‖x‖` for a low-rank `L` and `R = W − L`."""
    return _worst("interpolation_bound", matrix, layer, error, residual_norm * _array(size), rounding)


def composition_bound(
    error: Numbers,
    size: Numbers,
    radius: Numbers,
    *,
    weight_norm: float,
    sparse_norm: float,
    low_rank_norm: float,
    rounding: Numbers = 0.0,
    matrix: str = "",
    layer: int | None = None,
) -> BoundCheck:
    """Theorem 4, `composition_bound`: `‖W x − L x'‖ ≤ ‖W‖ ε + ‖W − S‖ ‖x'‖ + ‖S − L‖ ‖x'‖`.

    `size` is `‖x'‖`, `radius` the `ε ≥ ‖x − x'‖` of each input; the norms are certified.
    """
    bound = weight_norm * _array(radius) + (sparse_norm + low_rank_norm) * _array(size)
    return _worst("composition_bound", matrix, layer, error, bound, rounding)


def trajectory_error_le(
    errors: Numbers, growth: Numbers, local: Numbers, *, unit: float = 2.0**-24, matrix: str = "residual stream"
) -> tuple[BoundCheck, ...]:
    """Equation (1), `trajectory_error_le`: `‖h_n − h'_n‖ ≤ composedBound K δ ‖h_0 − h'_0‖ n`, for `n = 1 … N`.

    `errors` (N + 1,), `growth` K (N,) with `‖f_k(h_k) − f_k(h'_k)‖ ≤ K_k ‖h_k − h'_k‖`, `local` δ (N,) with
    `‖f_k(h'_k) − g_k(h'_k)‖ ≤ δ_k`. K measured along a trajectory holds for that one only: the checks are
    marked as estimates. `unit` is the relative rounding of the measured norms.
    """
    e, K, delta = _array(errors), _array(growth), _array(local)
    if len(e) != len(K) + 1 or len(K) != len(delta):
        raise LyapunovPruneError(f"{len(e)} errors, {len(K)} growth factors and {len(delta)} local errors do not fit")
    checks, bound = [], float(e[0])
    for n in range(len(K)):
        bound = float(K[n] * bound + delta[n])
        rounding = 8 * (n + 2) * unit * bound
        checks.append(
            _worst("trajectory_error_le", matrix, n, e[n + 1 : n + 2], np.array([bound]), rounding, estimate=True)
        )
    return tuple(checks)


def nonlinear_composition_bound(
    errors: Numbers, growth: Numbers, local: Numbers, *, unit: float = 2.0**-24, matrix: str = "residual stream"
) -> BoundCheck:
    """Theorem 11, `nonlinear_composition_bound`: `e_2 ≤ K_1 K_0 e_0 + K_1 δ_0 + δ_1` for two layers.

    `errors` holds `e_0, e_1, e_2`, `growth` `K_0, K_1` and `local` `δ_0, δ_1`; an estimate as above.
    """
    e, (K0, K1), (d0, d1) = _array(errors), _array(growth), _array(local)
    bound = np.array([K1 * K0 * e[0] + K1 * d0 + d1])
    return _worst("nonlinear_composition_bound", matrix, None, e[2:3], bound, 32 * unit * bound, estimate=True)


def lyapunov_contraction_bound(
    errors: Numbers, gamma: float, local: float, *, unit: float = 2.0**-24, matrix: str = "residual stream"
) -> BoundCheck:
    """Theorem 8, `lyapunov_contraction_bound`: `e_n ≤ γⁿ e_0 + δ (1 − γⁿ)/(1 − γ)` for `n = 1 … N`.

    `errors` is (N + 1,); `gamma` bounds every growth factor, `local` every local error; both measured, so
    the check is an estimate. Raises LyapunovPruneError unless `0 ≤ γ < 1`, the theorem's hypothesis.
    """
    if not 0 <= gamma < 1:
        raise LyapunovPruneError(f"Theorem 8 needs a contraction 0 ≤ γ < 1, not {gamma:.4g}; use trajectory_error_le")
    e = _array(errors)
    power = gamma ** np.arange(1, len(e), dtype=np.float64)
    bound = power * e[0] + local * (1 - power) / (1 - gamma)
    return _worst("lyapunov_contraction_bound", matrix, None, e[1:], bound, 8 * len(e) * unit * bound, estimate=True)


def residual_growth_contraction(
    relative_energy: Numbers, error_growth: Numbers, state_growth: Numbers, *, unit: float = 2.0**-24
) -> tuple[BoundCheck, ...]:
    """Theorem 9, `residual_growth_contraction`: where the state grows faster than the error, `V' < V`.

    Energies, as a ContractionProfile holds them: `relative_energy` (L + 1,), `error_growth` and
    `state_growth` (L,). One check for each layer that meets the hypothesis `a < g`, and none for the others:
    `V' ≤ (a/g) V` with energies for a and g (`relative_error_le`), which is below V.
    """
    V, a, g = _array(relative_energy), _array(error_growth), _array(state_growth)
    return tuple(
        _worst(
            "residual_growth_contraction",
            f"layer {k}",
            k,
            V[k + 1 : k + 2],
            a[k] / g[k] * V[k : k + 1],
            16 * unit * V[k],
            estimate=True,
        )
        for k in np.flatnonzero(a < g).tolist()
    )


@dataclass(frozen=True)
class TokenCertificate(Result):
    """Per token, whether an approximation can change the predicted token at all. Arrays are (tokens,).

    A token is certified when its state moved by less than `radius`, the largest movement that provably
    changes nothing. A certified token that changed all the same is a violation.
    """

    radius: np.ndarray  # min_j (z_i − z_j) / (‖w_i‖ + ‖w_j‖), i the dense prediction
    moved: np.ndarray  # ‖h' − h‖, rounded up
    changed: np.ndarray  # 1 where the prediction is another one, by its logits in float64

    @property
    def certified(self) -> np.ndarray:
        return self.moved < self.radius

    @property
    def violations(self) -> tuple[int, ...]:
        return tuple(int(t) for t in np.flatnonzero(self.certified & (self.changed > 0)))

    def to_frame(self) -> pd.DataFrame:
        columns = {"radius": self.radius, "moved": self.moved, "certified": self.certified}
        return pd.DataFrame({"token": np.arange(len(self.radius)), **columns, "changed": self.changed > 0})

    def headline(self) -> str:
        return (
            f"Token certificate (argmax_unchanged_of_state_error): {int(self.certified.sum())} of {len(self.radius)} "
            f"predictions cannot change, {int(self.changed.sum())} did, {len(self.violations)} of the certified ones"
        )


@torch.no_grad()
def argmax_unchanged_of_state_error(
    state: torch.Tensor, changed: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None = None
) -> TokenCertificate:
    """Theorem `argmax_unchanged_of_state_error`: `i` stays the argmax while `z_i − z_j > (‖w_i‖ + ‖w_j‖) r`.

    `state` and `changed` (tokens × d) are what enters the head of the dense and of the approximated model,
    `r` their distance; `head` is (vocabulary × d). A bias shifts both logits alike (`argmax_unchanged`), and
    a soft cap or scale of the logits is monotone, so both leave the statement as it is.
    """
    W = head.detach().cpu().double()
    b = torch.zeros(len(W), dtype=torch.float64) if bias is None else bias.detach().cpu().double()
    norms = torch.linalg.vector_norm(W, dim=-1)
    unit = 2.0**-52 * (W.shape[1] + 8)
    radii, moves, flips = [], [], []
    for h, h2 in zip(state.cpu().double().split(_TOKENS), changed.cpu().double().split(_TOKENS), strict=True):
        z = h @ W.T + b
        best, first = z.max(-1)
        reach = norms[first].unsqueeze(-1) + norms
        # What rounding may have added to the lead of i over j.
        rounding = unit * (reach * token_energy(h).sqrt().unsqueeze(-1) + b.abs().max() * 2)
        lead = best.unsqueeze(-1) - z - rounding
        radius = torch.where(reach > 0, lead / reach.clamp_min(torch.finfo(torch.float64).tiny), torch.inf)
        radius.scatter_(1, first.unsqueeze(-1), torch.inf)
        radii.append(radius.amin(-1) * (1 - unit))
        moves.append(token_energy(h2 - h).sqrt() * (1 + unit))
        flips.append(((h2 @ W.T + b).argmax(-1) != first).double())
    return TokenCertificate(*(torch.cat(parts).numpy() for parts in (radii, moves, flips)))


def _array(numbers: Numbers) -> np.ndarray:
    return np.atleast_1d(np.asarray(numbers, dtype=np.float64))


def _worst(
    theorem: str,
    matrix: str,
    layer: int | None,
    error: Numbers,
    bound: np.ndarray,
    rounding: Numbers,
    estimate: bool = False,
) -> BoundCheck:
    """The input with the largest error / (bound + margin). NaN is no check: it raises."""
    error, bound = np.broadcast_arrays(_array(error), bound)
    if not len(error):
        raise LyapunovPruneError(f"{theorem} on {matrix}: no inputs to check")
    margin = np.broadcast_to(_array(rounding), bound.shape) + _BOUND_ROUNDING * bound
    if not (np.isfinite(error).all() and np.isfinite(bound).all() and np.isfinite(margin).all()):
        raise LyapunovPruneError(f"{theorem} on {matrix}: NaN or infinity; check the activations and the weights")
    with np.errstate(over="ignore"):  # any error is infinitely worse than a bound of zero
        share = error / np.maximum(bound + margin, np.finfo(np.float64).tiny)
    at = int(np.argmax(share))
    return BoundCheck(
        theorem=theorem,
        matrix=matrix,
        layer=layer,
        error=float(error[at]),
        bound=float(bound[at]),
        margin=float(margin[at]),
        inputs=len(error),
        estimate=estimate,
    )
