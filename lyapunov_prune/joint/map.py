"""The map: the score after recovery as a polynomial in the removed shares of attentions and activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from scipy import stats

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.arrays import require_array, require_fitting
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

DEGREES = (1, 2, 3, 4)
# Singular values below this count as zero when two points are left out: 1 − h has an error of a few 2⁻⁵².
_LOST = 2.0**-40
_POINTS = "share of attentions and of activations removed"


@dataclass(frozen=True)
class JointMap(Result):
    """`P(r_a, r_g) = Σ_{i+j≤κ} θ_ij r_aⁱ r_gʲ` by least squares, with κ chosen by leave-two-out cross-validation.

    `removed` (n, 2) holds the shares `r = n/L` of attentions and activations removed at each point, `scores` (n,) its
    score after recovery, larger is better. `coefficients` are θ in the order of `terms(degree)`. `errors` is the
    leave-two-out RMSE of every degree that could be tried, `excluded` the reason for every other degree.
    """

    removed: Annotated[np.ndarray, Per("point", 2, most=1.0)]
    scores: Annotated[np.ndarray, Per("point", least=-np.inf)]
    degree: int
    coefficients: np.ndarray
    errors: dict[int, float]
    excluded: dict[int, str]
    measured_on: tuple[MeasuredOn, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fitting(self.degree in self.errors, f"map: degree {self.degree} was not tried")
        require_array("map, coefficients", self.coefficients, (len(terms(self.degree)),), least=-np.inf)

    @property
    def error(self) -> float:
        """Leave-two-out RMSE of the chosen degree."""
        return self.errors[self.degree]

    @property
    def residual(self) -> tuple[float, int]:
        """`√(Σ(y − P)² / (n − p))` with its n − p degrees of freedom: noise of the scores plus misfit of the map."""
        freedom = len(self.scores) - len(self.coefficients)
        left = self.scores - self.predict(self.removed)
        return float(np.sqrt(left @ left / freedom)), freedom

    def predict(self, removed: np.ndarray) -> np.ndarray:
        """P (…) at removed shares (…, 2)."""
        return design(removed, self.degree) @ self.coefficients

    def leverage(self, removed: np.ndarray) -> np.ndarray:
        """`h(x) = xᵀ(XᵀX)⁻¹x` (…) at removed shares (…, 2): the variance of P for scores of variance one."""
        solve = _factor(design(self.removed, self.degree)).solve
        return np.square(design(removed, self.degree) @ solve).sum(-1)

    def contrast(self, removed: np.ndarray) -> np.ndarray:
        """The variance of P minus its mean over these m points, (m,), so that a common shift does not count."""
        X = design(removed, self.degree)
        return np.square((X - X.mean(0)) @ _factor(design(self.removed, self.degree)).solve).sum(-1)

    def interval(self, removed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """95 % prediction interval of the score of one more recovered model: `P ± t s √(1 + h)`.

        `s` is `residual`, t Student's quantile with its n − p degrees of freedom. Valid if the polynomial has the right
        degree and the errors of the scores are independent, normal and of equal variance. Points that inherit weights
        from each other are not independent, and then the interval is too narrow.
        """
        deviation, freedom = self.residual
        half = stats.t.ppf(0.975, freedom) * deviation * np.sqrt(1 + self.leverage(removed))
        return self.predict(removed) - half, self.predict(removed) + half

    def to_frame(self) -> pd.DataFrame:
        predicted = self.predict(self.removed)
        columns = {"attention": self.removed[:, 0], "activation": self.removed[:, 1], "score": self.scores}
        return pd.DataFrame({**columns, "predicted": predicted, "residual": self.scores - predicted})

    def headline(self) -> str:
        tried = ", ".join(f"degree {degree} {error:.3g}" for degree, error in self.errors.items())
        left = "".join(f"; degree {degree} excluded: {reason}" for degree, reason in self.excluded.items())
        return (
            f"Map of degree {self.degree} through {len(self.scores)} points ({_POINTS}); "
            f"leave-two-out RMSE: {tried}{left}"
        )


@checked
def fit_map(
    removed: Sequence[Sequence[float]], scores: Sequence[float], *, measured_on: Sequence[MeasuredOn] = ()
) -> JointMap:
    """Fit the map: choose the degree of least leave-two-out RMSE and fit it to all points.

    `removed` (n, 2) are shares of attentions and activations removed, `scores` (n,). Every pair of points is left out
    once and predicted from the rest; the RMSE is over these n(n − 1) errors. A degree whose design matrix loses rank
    when some pair is left out is excluded. Among degrees that are equal up to rounding the lowest is taken. (Boundary
    depth pruning, MAP.)

    Raises LyapunovPruneError for shares outside 0 to 1, scores that are not finite, and for points that allow no
    degree, with points to add.
    """
    if len(removed) != len(scores) or any(len(point) != 2 for point in removed):
        raise LyapunovPruneError(
            f"{len(removed)} points and {len(scores)} scores; give a pair of shares for each score"
        )
    shares, y = np.asarray(removed, np.float64).reshape(-1, 2), np.asarray(scores, np.float64)
    require_array("points, removed", shares, shares.shape, most=1.0)
    require_array("points, scores", y, y.shape, least=-np.inf)
    errors: dict[int, float] = {}
    excluded: dict[int, str] = {}
    for degree in DEGREES:
        reason = _poverty(shares, degree)
        if reason:
            excluded[degree] = f"{reason}; sample also {', '.join(map(_named, _needed(shares, degree)))}"
        else:
            errors[degree] = float(left_two_out(shares, y, degree))
    if not errors:
        raise LyapunovPruneError(f"these points do not determine even a plane: {excluded[DEGREES[0]]} ({_POINTS})")
    degree = list(errors)[int(first_of_least(np.array(list(errors.values())), y))]
    return JointMap(shares, y, degree, coefficients(shares, y, degree), errors, excluded, tuple(measured_on))


def coefficients(removed: np.ndarray, scores: np.ndarray, degree: int) -> np.ndarray:
    """θ by least squares, (…, p), from scores (…, n)."""
    factor = _factor(design(removed, degree))
    return scores @ factor.basis @ factor.solve.T


def first_of_least(errors: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """From errors (degrees, …) for scores (…, n), the index (…) of the first one that is minimal up to rounding."""
    return np.argmax(errors <= errors.min(0) + _LOST * np.abs(scores).max(-1), axis=0)


def left_two_out(removed: np.ndarray, scores: np.ndarray, degree: int) -> np.ndarray:
    """Leave-two-out RMSE, (…), from scores (…, n)."""
    return np.sqrt(np.square(left_out_errors(removed, scores, degree)).mean((-2, -1)))


def left_out_errors(removed: np.ndarray, scores: np.ndarray, degree: int) -> np.ndarray:
    """Errors of both points of a left-out pair, predicted from all others: (…, n(n − 1)/2, 2), pairs i < j in order.

    With the hat matrix H and the residuals e of the fit to all points, they are `(1 − H_PP)⁻¹ e_P` for a pair P,
    exactly.
    """
    factor = _factor(design(removed, degree))
    e = scores - scores @ factor.basis @ factor.basis.T
    i, j, a, b, c = _pairs(factor.basis)
    e_i, e_j = e[..., i], e[..., j]
    return np.stack([b * e_i + c * e_j, c * e_i + a * e_j], axis=-1) / (a * b - c**2)[:, None]


def terms(degree: int) -> list[tuple[int, int]]:
    """Exponents (i, j) of `r_aⁱ r_gʲ`, by increasing i + j and then decreasing i."""
    return [(i, total - i) for total in range(degree + 1) for i in range(total, -1, -1)]


def design(removed: np.ndarray, degree: int) -> np.ndarray:
    """The design matrix: terms of P, (…, p), at removed shares (…, 2)."""
    r_a, r_g = np.moveaxis(np.asarray(removed, np.float64), -1, 0)
    return np.stack([r_a**i * r_g**j for i, j in terms(degree)], axis=-1)


class _Factor(NamedTuple):
    """`design @ solve = basis` with orthonormal columns, where the design has full rank."""

    basis: np.ndarray
    solve: np.ndarray
    lost: np.ndarray  # null space of the design: (p, p − rank)


def _factor(X: np.ndarray) -> _Factor:
    size = np.linalg.norm(X, axis=0)
    scale = np.where(size > 0, size, 1.0)
    u, s, v = np.linalg.svd(X / scale, full_matrices=True)
    rank = int((s > max(X.shape) * np.finfo(np.float64).eps * s.max(initial=0)).sum())
    return _Factor(u[:, :rank], (v[:rank] / s[:rank, None]).T / scale[:, None], v[rank:].T / scale[:, None])


def _pairs(basis: np.ndarray) -> tuple[np.ndarray, ...]:
    """For every pair i < j: i, j, and `1 − H_PP = [[a, −c], [−c, b]]` with `H = basis basisᵀ`."""
    H = basis @ basis.T
    i, j = np.triu_indices(len(H), 1)
    free = 1 - H.diagonal()
    return i, j, free[i], free[j], H[i, j]


def _losses(basis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every pair i < j, (n(n − 1)/2, 2), and the loss of rank without it: the number of zero eigenvalues of `1 − H_PP`.

    They are the squared singular values, below one, of the basis without the pair.
    """
    i, j, a, b, c = _pairs(basis)
    middle, half = (a + b) / 2, np.sqrt(np.square((a - b) / 2) + c**2)
    return np.stack([i, j], axis=-1), (middle - half <= _LOST).astype(int) + (middle + half <= _LOST)


def _poverty(removed: np.ndarray, degree: int) -> str | None:
    """Why this degree cannot be cross-validated by leaving out two points; None if it can."""
    count, n = len(terms(degree)), len(removed)
    if n < count + 2:
        return f"{count} coefficients and two points to leave out need {count + 2} points, not {n}"
    factor = _factor(design(removed, degree))
    rank = factor.basis.shape[1]
    if rank < count:
        return f"all {n} points determine {rank} of {count} coefficients"
    pairs, lost = _losses(factor.basis)
    if not lost.any():
        return None
    out = " and ".join(map(_named, removed[pairs[lost.argmax()]]))
    others = f", the first of {(lost > 0).sum()} such pairs," if (lost > 0).sum() > 1 else ""
    return f"without {out}{others} the rest determine {count - lost.max()} of {count} coefficients"


def _needed(removed: np.ndarray, degree: int) -> np.ndarray:
    """Points to add so that any two points can be left out without loss of rank.

    They are taken one by one from a lattice that reaches as far as the points, each where the polynomials that vanish
    on the remaining points are largest. No polynomial of degree κ vanishes on a lattice of 2κ + 1 steps minus two
    points, so one is always left to take.
    """
    reach = float(removed.max(initial=0)) or 1.0
    steps = np.linspace(0, reach, 2 * degree + 1)
    lattice = np.stack(np.meshgrid(steps, steps, indexing="ij"), axis=-1).reshape(-1, 2)
    points = removed
    while _poverty(points, degree):
        factor = _factor(design(points, degree))
        vanishing = factor.lost
        if not vanishing.size:
            pairs, lost = _losses(factor.basis)
            directions = np.linalg.svd(factor.basis[pairs[lost.argmax()]])[2]
            vanishing = factor.solve @ directions[: lost.max()].T
        near = np.abs(lattice[:, None] - points).max(-1).min(-1, initial=np.inf)
        lattice = lattice[near > 1e-6 * reach]
        size = np.linalg.norm(design(lattice, degree) @ vanishing, axis=1)
        points = np.append(points, lattice[[size.argmax()]], axis=0)
    return points[len(removed) :]


def _named(point: np.ndarray) -> str:
    return f"({point[0]:.3g}, {point[1]:.3g})"
