"""Which layers of a model satisfy the hypothesis of Theorem 10, and whether its conclusion holds there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.checkers import preln_contraction_sufficient
from lyapunov_prune.linalg import lift, token_energy
from lyapunov_prune.results.frames import pd, rows
from lyapunov_prune.results.result import Result


@dataclass(frozen=True)
class LayerAlignment(Result):
    """The three quantities of Theorem 10 for every layer, (L,) float64, measured along two trajectories (estimates).

    A layer maps the state `h` to `h + s` and the error `e` to `e + d`. `gain = ‖s‖/‖h‖`, `align` is the cosine of `h`
    and `s`, and `kappa = ‖d‖/‖e‖`; all tokens together form one vector. If `(1 + κ)² < 1 + 2 align gain + gain²`
    (`meets`), the relative error decreases. `share` is the share of tokens with a nonzero error that satisfy the
    condition each on its own. `share` and `kappa` are NaN where no token has an error (layer 0, for example). `checks`
    compare the measured ρ of the tokens that satisfy the condition with the bound of the theorem.
    """

    align: np.ndarray
    gain: np.ndarray
    kappa: np.ndarray
    share: np.ndarray
    checks: tuple[BoundCheck, ...]

    @property
    def state_growth(self) -> np.ndarray:
        """`1 + 2 align gain + gain² = ‖h + s‖²/‖h‖²`."""
        return 1 + 2 * self.align * self.gain + self.gain**2

    @property
    def meets(self) -> np.ndarray:
        """Whether a layer satisfies the condition with all its tokens together, (L,) bool."""
        return (1 + self.kappa) ** 2 < self.state_growth

    def to_frame(self) -> pd.DataFrame:
        return rows(self, "layer", "align", "gain", "kappa", "state_growth", "meets", share_of_tokens="share")

    def headline(self) -> str:
        reached = ~np.isnan(self.share)
        layers = ", ".join(map(str, np.flatnonzero(self.meets)))
        share = f", and by {self.share[reached].mean():.1%} of single tokens" if reached.any() else ""
        return (
            f"Theorem 10, (1 + κ)² < 1 + 2 align gain + gain²: met by {int(self.meets.sum())} of the "
            f"{int(reached.sum())} layers that an error reaches{f' ({layers})' if layers else ''}{share} "
            "(preln_contraction_sufficient, measured)"
        )


class AlignmentSums:
    """Sums for `LayerAlignment`, layer by layer, accumulated over forwards."""

    def __init__(self, layers: int) -> None:
        self._state, self._added, self._along = (np.zeros(layers) for _ in range(3))
        self._error, self._changed, self._reached = (np.zeros(layers) for _ in range(3))
        self._checks: list[BoundCheck | None] = [None] * layers

    def add(
        self, layer: int, before: tuple[torch.Tensor, torch.Tensor], after: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Add the dense and the approximated states (…, d) before and after the exact layer."""
        # The layer before may be on another device.
        h, moved, h_out, moved_out = (lift(state).flatten(0, -2).to(after[0].device) for state in (*before, *after))
        e, e_out, s = moved - h, moved_out - h_out, h_out - h
        along = (h * s).sum(-1).cpu().numpy()
        states, added, outs, errors, errors_out, changed = (
            token_energy(x).cpu().numpy() for x in (h, s, h_out, e, e_out, e_out - e)
        )
        for total, tokens in (
            *((self._state, states), (self._added, added), (self._along, along)),
            *((self._error, errors), (self._changed, changed)),
        ):
            total[layer] += tokens.sum()
        seen = (errors > 0) & (states > 0) & (outs > 0)  # ρ is undefined for a token without an error
        self._reached[layer] += seen.sum()
        states, added, outs, along = (x[seen] for x in (states, added, outs, along))
        check = preln_contraction_sufficient(
            errors_out[seen] / outs / (errors[seen] / states),
            np.sqrt(changed[seen] / errors[seen]),
            _cosine(along, states, added),
            np.sqrt(added / states),
            layer=layer,
        )
        if check is not None:
            self._checks[layer] = check.with_more(self._checks[layer])

    def result(self) -> LayerAlignment:
        meeting = np.array([0 if check is None else check.inputs for check in self._checks])
        with np.errstate(invalid="ignore", divide="ignore"):
            return LayerAlignment(
                align=_cosine(self._along, self._state, self._added),
                gain=np.sqrt(self._added / self._state),
                kappa=np.where(self._reached > 0, np.sqrt(self._changed / self._error), np.nan),
                share=meeting / self._reached,  # 0 / 0 is NaN
                checks=tuple(check for check in self._checks if check is not None),
            )


def _cosine(product: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`⟨a, b⟩ / (‖a‖ ‖b‖)` from squared norms; 0 where one of them is zero."""
    size = np.sqrt(a * b)
    return np.divide(product, size, out=np.zeros_like(size), where=size > 0)
