"""The token certificate: how far a state may move before the predicted token can change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lyapunov_prune.linalg import token_energy
from lyapunov_prune.results.frames import pd, rows
from lyapunov_prune.results.result import Result

# Entries of tokens × vocabulary in float64 per block, and rows of the head upcast to float64 at once.
_ENTRIES, _COLUMNS = 2**22, 4096
# Maps predicted rows (tokens × d), their norms (tokens × 1), rows of the head and their norms to tokens × rows.
_Reach = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenCertificate(Result):
    """Per token, whether an approximation can change the predicted token. Arrays are (tokens,).

    A token is certified when its state moved by less than `radius`, within which the prediction provably stays the
    same. A certified token that changed nevertheless is a violation.
    """

    radius: np.ndarray  # min_j (z_i − z_j) / (‖w_i‖ + ‖w_j‖), or / ‖w_i − w_j‖, i the dense prediction
    moved: np.ndarray  # ‖h' − h‖, rounded up
    changed: np.ndarray  # bool: the prediction changed, by logits in float64

    def __post_init__(self) -> None:
        object.__setattr__(self, "changed", self.changed.astype(bool))  # 0.0 and 1.0 in files of older versions

    @property
    def certified(self) -> np.ndarray:
        return self.moved < self.radius

    @property
    def violations(self) -> tuple[int, ...]:
        return tuple(int(t) for t in np.flatnonzero(self.certified & self.changed))

    def to_frame(self) -> pd.DataFrame:
        return rows(self, "token", "radius", "moved", "certified", "changed")

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

    `state` and `changed` (tokens × d) are the inputs of the head in the dense and in the approximated model, `r` is
    their distance; `head` is (vocabulary × d). A bias shifts both logits by the same amount (`argmax_unchanged`), and a
    soft cap or scale of the logits is monotone, so neither changes the statement.
    """
    return _certificate(state, changed, head, bias, _sum_of_norms)


@torch.no_grad()
def argmax_unchanged_of_row_difference(
    state: torch.Tensor, changed: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None = None
) -> TokenCertificate:
    """Theorem `argmax_unchanged_of_row_difference`: `i` stays the argmax while `z_i − z_j > ‖w_i − w_j‖ r`.

    Like `argmax_unchanged_of_state_error`, whose radius is never larger: orthogonal rows of equal norm are `√2` norms
    apart instead of two, and similar rows less. It costs the products of the predicted row with all rows. A bias shifts
    `z_i − z_j` of both models by the same amount. Here `radius` is `min_j (z_i − z_j) / ‖w_i − w_j‖`.
    """
    return _certificate(state, changed, head, bias, _distance)


def _sum_of_norms(own: torch.Tensor, size: torch.Tensor, W: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """`‖w_i‖ + ‖w_j‖`, tokens × vocabulary."""
    return size + norms


def _distance(own: torch.Tensor, size: torch.Tensor, W: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """`‖w_i − w_j‖` from `‖w_i‖² + ‖w_j‖² − 2 w_i·w_j`, rounded up."""
    squares = size.square() + norms.square()
    unit = 2.0**-52 * (W.shape[1] + 8)
    return (squares - 2 * own @ W.T + 2 * unit * squares).clamp_min(0).sqrt()


def _certificate(
    state: torch.Tensor, changed: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, reach_of: _Reach
) -> TokenCertificate:
    head = head.detach().cpu()
    b = torch.zeros(len(head), dtype=torch.float64) if bias is None else bias.detach().cpu().double()
    tiles = [slice(start, start + _COLUMNS) for start in range(0, len(head), _COLUMNS)]
    norms = torch.cat([torch.linalg.vector_norm(head[tile].double(), dim=-1) for tile in tiles])
    unit = 2.0**-52 * (head.shape[1] + 8)
    radii, moves, flips = [], [], []
    tokens, largest_bias = max(1, _ENTRIES // len(head)), b.abs().max()
    for h, h2 in zip(state.cpu().double().split(tokens), changed.cpu().double().split(tokens), strict=True):
        products = [(h @ W.T, h2 @ W.T) for W in (head[tile].double() for tile in tiles)]
        z, z2 = (torch.cat(parts, dim=-1) + b for parts in zip(*products, strict=True))
        best, first = z.max(-1, keepdim=True)
        flips.append(z2.argmax(-1) != first.squeeze(-1))
        own, size, length = head[first.squeeze(-1)].double(), norms[first], token_energy(h).sqrt().unsqueeze(-1)
        least = torch.full((len(h),), torch.inf, dtype=torch.float64)
        for tile in tiles:
            W = head[tile].double()
            reach = reach_of(own, size, W, norms[tile])
            # Largest rounding error of the lead of i over j.
            summed = _sum_of_norms(own, size, W, norms[tile])
            rounding = unit * (summed * length + largest_bias * 2)
            lead = best - z[:, tile] - rounding
            radius = torch.where(
                reach > 0,
                lead / reach.clamp_min(torch.finfo(torch.float64).tiny),
                torch.where(lead > 0, torch.inf, 0.0),  # equal rows
            )
            radius[torch.arange(tile.start, tile.start + len(W)) == first] = torch.inf
            least = torch.minimum(least, radius.amin(-1))
        radii.append(least * (1 - unit))
        moves.append(token_energy(h2 - h).sqrt() * (1 + unit))
    return TokenCertificate(*(torch.cat(parts).numpy() for parts in (radii, moves, flips)))
