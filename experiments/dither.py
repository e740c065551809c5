"""Weights off the grid on which they were stored: a model dequantised from few bits is nearly free to round again.

A comparison of roundings on such a model would measure how well a rounding finds the old grid, so it starts from a
dithered copy, which is then the reference.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.plain import plain

BLOCK = 16  # values that share a step in every GGUF type of 2 to 8 bits; their blocks hold 16, 32 or 256
_MULTIPLES = 8  # the smallest gap between two values of a block is at most so many steps
_OFF = 0.05  # how far, in steps, a value may lie from the grid: float32 rounds the stored product
_ROWS = 4096  # rows at a time, to bound the memory


@dataclass(frozen=True)
class Dithered:
    """A copy of a model whose weights lie off their grid, the seed, and the share of the values that had one.

    `on_grid` names every matrix; 0 is a matrix that was stored unrounded and is unchanged.
    """

    decoder: Decoder
    seed: int
    on_grid: dict[str, float]


@torch.no_grad()
def dither(decoder: Decoder, seed: int = 0) -> Dithered:
    """Add noise, uniform within ± half a step, to every weight of a copy of a model dequantised to float32.

    The step is that of the grid of the weight's own block (`steps_of`), so rounding to the old grid gives the old
    weights back. A matrix that several modules share is dithered once. The noise has the variance of rounding to that
    grid, so it costs what the rounding did: perplexity × 1.29 on SmolLM2-135M-Instruct from Q4_1 (4,096 tokens of the
    WikiText validation text, seed 0, 95 % 1.25 to 1.34). Say what the dithered reference costs wherever it is used.
    Raises LyapunovPruneError for another dtype, and for a model in which no matrix lies on a grid.
    """
    model = copy.deepcopy(plain(decoder).model)
    random = torch.Generator().manual_seed(seed)
    on_grid: dict[str, float] = {}
    for name, W in model.named_parameters():
        if W.ndim != 2 or W.shape[1] % BLOCK:
            continue
        if W.dtype != torch.float32:
            raise LyapunovPruneError(f"{name} is {W.dtype}, too coarse to see a grid in; load it in float32")
        found = 0
        for rows in W.split(_ROWS):
            step = steps_of(rows)
            noise = torch.rand(rows.shape, generator=random, dtype=torch.float64).to(W.device) - 0.5
            rows += (noise * step.repeat_interleave(BLOCK, 1)).to(rows)
            found += int((step > 0).sum()) * BLOCK
        on_grid[name] = found / W.numel()
    if not any(on_grid.values()):
        raise LyapunovPruneError("no matrix of this model lies on a grid; there is nothing to dither")
    return Dithered(wrap(model, decoder.tokenizer), seed, on_grid)


def steps_of(W: torch.Tensor) -> torch.Tensor:
    """The step of the grid in every block of 16 columns of a row, (rows × columns / 16) float64; 0 if there is none.

    It is the largest step of which all differences in the block are multiples: the smallest gap, divided by the least
    k ≤ 8 that makes them so. Sixteen values without a grid pass with a chance below 1e-6.
    """
    values = W.double().unflatten(1, (-1, BLOCK)).sort(dim=-1).values
    gaps = values.diff(dim=-1)
    size = values[..., -1:] - values[..., :1]
    least = gaps.where(gaps > 1e-4 * size, torch.inf).amin(-1)
    ratios = (values - values[..., :1]) / least[..., None]
    step = torch.zeros_like(least)
    for k in range(_MULTIPLES, 0, -1):  # the smallest k is assigned last
        multiples = ratios * k
        fits = ((multiples - multiples.round()).abs() < _OFF).all(-1)
        step = torch.where(fits, least / k, step)
    return step.where(least.isfinite(), 0)
