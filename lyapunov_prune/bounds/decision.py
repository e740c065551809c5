"""The token certificate: how far a state may move before the predicted token can change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from lyapunov_prune.linalg import token_energy
from lyapunov_prune.results.result import Result

# Tokens whose logits are formed at once.
_TOKENS = 64


@dataclass(frozen=True)
class TokenCertificate(Result):
    """Per token, whether an approximation can change the predicted token at all. Arrays are (tokens,).

    A token is certified when its state moved by less than `radius`, the largest movement that provably
    changes nothing. A certified token that changed all the same is a violation.
    """

    radius: np.ndarray  # min_j (z_i − z_j) / (‖w_i‖ + ‖w_j‖), or / ‖w_i − w_j‖, i the dense prediction
    moved: np.ndarray  # ‖h' − h‖, rounded up
    changed: np.ndarray  # bool: the prediction is another one, by its logits in float64

    def __post_init__(self) -> None:
        object.__setattr__(self, "changed", self.changed.astype(bool))  # 0.0 and 1.0 in files of older versions

    @property
    def certified(self) -> np.ndarray:
        return self.moved < self.radius

    @property
    def violations(self) -> tuple[int, ...]:
        return tuple(int(t) for t in np.flatnonzero(self.certified & self.changed))

    def to_frame(self) -> pd.DataFrame:
        columns = {"radius": self.radius, "moved": self.moved, "certified": self.certified}
        return pd.DataFrame({"token": np.arange(len(self.radius)), **columns, "changed": self.changed})

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
    return _certificate(state, changed, head, bias, _sum_of_norms)


@torch.no_grad()
def argmax_unchanged_of_row_difference(
    state: torch.Tensor, changed: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None = None
) -> TokenCertificate:
    """Theorem `argmax_unchanged_of_row_difference`: `i` stays the argmax while `z_i − z_j > ‖w_i − w_j‖ r`.

    As `argmax_unchanged_of_state_error`, whose radius is never the larger one: rows of one norm at a right angle are
    `√2` norms apart and not two, like rows less. It costs the products of the predicted row with all rows. The bias
    shifts `z_i − z_j` of both models alike. Here `radius` is `min_j (z_i − z_j) / ‖w_i − w_j‖`.
    """
    return _certificate(state, changed, head, bias, _distance)


def _sum_of_norms(W: torch.Tensor, norms: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """`‖w_i‖ + ‖w_j‖`, tokens × vocabulary."""
    return norms[first].unsqueeze(-1) + norms


def _distance(W: torch.Tensor, norms: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """`‖w_i − w_j‖` from `‖w_i‖² + ‖w_j‖² − 2 w_i·w_j`, raised by what rounding may have taken: never too small."""
    squares = norms[first].square().unsqueeze(-1) + norms.square()
    unit = 2.0**-52 * (W.shape[1] + 8)
    return (squares - 2 * W[first] @ W.T + 2 * unit * squares).clamp_min(0).sqrt()


def _certificate(
    state: torch.Tensor,
    changed: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    reach_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> TokenCertificate:
    W = head.detach().cpu().double()
    b = torch.zeros(len(W), dtype=torch.float64) if bias is None else bias.detach().cpu().double()
    norms = torch.linalg.vector_norm(W, dim=-1)
    unit = 2.0**-52 * (W.shape[1] + 8)
    radii, moves, flips = [], [], []
    for h, h2 in zip(state.cpu().double().split(_TOKENS), changed.cpu().double().split(_TOKENS), strict=True):
        z = h @ W.T + b
        best, first = z.max(-1)
        reach = reach_of(W, norms, first)
        # What rounding may have added to the lead of i over j.
        rounding = unit * (_sum_of_norms(W, norms, first) * token_energy(h).sqrt().unsqueeze(-1) + b.abs().max() * 2)
        lead = best.unsqueeze(-1) - z - rounding
        radius = torch.where(
            reach > 0,
            lead / reach.clamp_min(torch.finfo(torch.float64).tiny),
            torch.where(lead > 0, torch.inf, 0.0),  # rows that no state tells apart
        )
        radius.scatter_(1, first.unsqueeze(-1), torch.inf)
        radii.append(radius.amin(-1) * (1 - unit))
        moves.append(token_energy(h2 - h).sqrt() * (1 + unit))
        flips.append((h2 @ W.T + b).argmax(-1) != first)
    return TokenCertificate(*(torch.cat(parts).numpy() for parts in (radii, moves, flips)))
