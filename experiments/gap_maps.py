"""Two published ways to close the gap of one run of removed layers without training, to hold mending against.

ReplaceMe (Shopkhoev and others, 2025) and LinearPatch (Chen and others, 2025), written from their descriptions. With
m what the feed-forward block before the gap adds, h the state behind it and y the dense state behind the gap, the first
replaces m by `T m`, the second h by `H D Hᵀ h`. Both are had by hooks here; `T` could be merged into the block's last
matrix, the patch is a matrix more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.linalg import hadamard as sylvester
from sympy import isprime
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import hidden_of, with_hidden
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.linalg import lift
from lyapunov_prune.mending.place import find_place
from lyapunov_prune.models.hooked import hooked

Hook = tuple[nn.Module, Callable[..., Any]]
LEAST_SQUARES, COSINE, PATCH = "ReplaceMe, least squares", "ReplaceMe, cosine", "LinearPatch"
_STEPS = 60


@dataclass(frozen=True)
class Gap:
    """Of all tokens, float64: m, h and y (tokens, width); and the modules that give m and h."""

    m: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor
    block: nn.Module | None
    layer: nn.Module


def one_run(removed: Sequence[int]) -> bool:
    """Whether layers are one run with a layer before it, which both ways ask for."""
    return removed[0] > 0 and list(removed) == list(range(removed[0], removed[-1] + 1))


def read_gap(reading: Reading, removed: Sequence[int]) -> Gap:
    """The states on both sides of a run of layers; `block` is None where nothing before it can take a full matrix."""
    first, stop = removed[0], removed[-1] + 1
    layer = reading.structure.layers[first - 1]
    place = find_place(reading.decoder, first - 1)
    module = layer.get_submodule(place.module)
    rows: dict[str, list[torch.Tensor]] = {"m": [], "h": [], "y": []}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        rows["m"].append(place.scale * flat(hidden_of(output)))

    prefix, windows = reading.prefix, reading.windows(1)
    with torch.no_grad(), hooked(after=[(module, note)]):
        for ids in windows:
            rows["h"].append(flat(prefix.advance(ids, 0, None, first)))
    with torch.no_grad():
        for ids in windows:
            rows["y"].append(flat(prefix.advance(ids, 0, None, stop)))
    m, h, y = (torch.cat(rows[name]) for name in "mhy")
    return Gap(m, h, y, None if place.channels else module, layer)


def flat(x: torch.Tensor) -> torch.Tensor:
    return lift(x.reshape(-1, x.shape[-1])).clone()


def closed(way: str, gap: Gap) -> Hook | None:
    """The hook of one of WAYS; None where the layer before the gap can not take its matrix."""
    if way == PATCH:
        return gap.layer, times(linear_patch(gap.h, gap.y))
    if gap.block is None:
        return None
    return gap.block, times((least_squares if way == LEAST_SQUARES else by_cosine)(gap.m, gap.h, gap.y))


WAYS = (LEAST_SQUARES, COSINE, PATCH)


def times(T: torch.Tensor) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = hidden_of(output)
        return with_hidden(output, (lift(x) @ T).to(x))

    return hook


def least_squares(m: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`argmin_T Σ_t ‖m_t T + (h_t − m_t) − y_t‖²`."""
    # On the CPU, because the driver that takes matrices of deficient rank is not there on CUDA.
    solved = torch.linalg.lstsq(m.cpu(), (y - (h - m)).cpu(), driver="gelsd").solution
    return solved.to(m)


def by_cosine(m: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`argmax_T Σ_t cos(m_t T + (h_t − m_t), y_t)`, from the identity on by L-BFGS; its authors take Adam."""
    T = torch.eye(m.shape[1]).to(m).requires_grad_()
    optimizer = torch.optim.LBFGS([T], max_iter=_STEPS, history_size=10, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = 1 - torch.cosine_similarity(m @ T + (h - m), y, dim=1).mean()
        found.backward()
        return found

    optimizer.step(loss)
    return T.detach()


def linear_patch(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`H D Hᵀ`, `d_k = Σ_t |y_t H|_k / Σ_t |h_t H|_k`, H a Hadamard matrix over √width."""
    H = torch.from_numpy(hadamard(h.shape[1]) / np.sqrt(h.shape[1])).to(h)
    d = (y @ H).abs().sum(0) / (h @ H).abs().sum(0)
    return (H * d) @ H.T


def hadamard(n: int) -> np.ndarray:
    """Entries ±1, rows orthogonal: Sylvester's, times Paley's first where n is no power of two.

    Raises LyapunovPruneError for an n that they do not make.
    """
    for order in range(1, n + 1):
        power, rest = divmod(n, order)
        if rest or power & (power - 1):
            continue
        if order == 1:
            return np.asarray(sylvester(n), float)
        if order % 4 == 0 and isprime(order - 1):
            return np.asarray(np.kron(sylvester(power), paley(order - 1)), float)
    raise LyapunovPruneError(f"no Hadamard matrix of order {n} by Sylvester and Paley; compare without {PATCH}")


def paley(q: int) -> np.ndarray:
    """Of order q + 1, for a prime q ≡ 3 modulo 4."""
    squares = {i * i % q for i in range(1, q)}
    character = np.array([0, *(1 if i in squares else -1 for i in range(1, q))])
    S = np.zeros((q + 1, q + 1))
    S[0, 1:], S[1:, 0] = 1, -1
    S[1:, 1:] = character[(np.arange(q)[:, None] - np.arange(q)) % q]
    return S + np.eye(q + 1)
