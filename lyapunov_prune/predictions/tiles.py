"""Divergences between predictions, summed over tiles of the vocabulary, with one exponential per logit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter, methodcaller

import torch

from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.linalg import lift, require_numbers
from lyapunov_prune.predictions.spaces import DENSE_LOGITS, divergences, log_softmax, squared, variance_r

# Columns of a tile, rows per call of exp, and the largest number of entries of one product:
# one product serves all changes of these rows, because products of few rows are slow.
_COLUMNS, _ROWS, _ENTRIES = 2048, 256, 2**23
_RUN = 128  # columns per partial maximum
_STEPS = 3  # intermediate numbers per entry of changed logits
MEASURES = 5


def measures(
    scorer: Scorer,
    dense: torch.Tensor,
    changed: Sequence[torch.Tensor],
    temperature: float,
    *,
    read_by: Sequence[Scorer] | None = None,
    wanted: torch.Tensor | None = None,
) -> torch.Tensor:
    """`variance`, `kl`, `reverse_kl`, `flipped` and `variance_r` of `SkipDivergence`: (changes, 5, positions) float64.

    `dense` and each of `changed` are final states, (positions × width), and `read_by` holds the scorers of `changed` if
    they are not all `scorer`. With `wanted`, the token that comes next at every position, a sixth row holds the loss
    `−log q(wanted)`. With `d = Δz/T`, `u = d − E_p d` and `A = Σ p (e^u − 1) = Σ p (e^u − 1 − u)`, a sum of
    non-negative terms:

    `KL(p‖q) = log(1 + A)`, `KL(q‖p) = Σ p (e^u − 1) u / (1 + A) − log(1 + A)`, `Var_p(d) = Σ p u²`. The logarithm of
    `Σ e^{z'/T}` is that of `Σ e^{z/T}` plus `E_p d + log(1 + A)`.

    A tile takes its sums relative to the d of its own most likely token, and `_whole_vocabulary` shifts them to the
    common mean, so the logits of a position are never in memory together. Rows in which a token gains more than 700,
    where `exp` overflows, are computed from whole rows (`divergences`). Raises LyapunovPruneError when the dense logits
    are not finite, and whatever `Scorer.logits` raises.
    """
    readers = [scorer, *(read_by or [scorer] * len(changed))]
    columns = min(_COLUMNS, scorer.vocabulary)
    at_once = columns if all(reader.blockwise for reader in readers) else scorer.vocabulary
    most = max(1, _ENTRIES // ((1 + len(changed)) * at_once))
    blocks = math.ceil(len(dense) / most)
    changes = max(1, _ROWS * blocks // len(dense))
    parts = [slice(first, first + changes) for first in range(0, len(changed), changes)]
    memory, found = None, []
    tokens = [None] * blocks if wanted is None else wanted.tensor_split(blocks)
    for here, *rows in zip(tokens, *(state.tensor_split(blocks) for state in (dense, *changed)), strict=True):
        of_dense, of_changed = [], []
        own = dense.new_zeros((len(changed), len(rows[0])), dtype=torch.float64)
        for number, logits in enumerate(_tiles(readers, rows, columns)):
            tile = _Tile(logits, temperature)
            if memory is None:
                memory = tile.z.new_empty(_STEPS * changes * tile.z.numel())
            of_dense.append(tile.sums())
            of_changed.append(torch.cat([tile.sums_of(part, memory) for part in parts], dim=1))
            if here is not None:
                own = tile.picked(own.to(tile.z.device), here.to(tile.z.device) - number * columns)
            del logits, tile  # free them before the next tile is allocated
        rows_found, normaliser = _whole_vocabulary(torch.stack(of_dense), torch.stack(of_changed), temperature, columns)
        losses = [] if here is None else [(normaliser - own.to(normaliser) / temperature).unsqueeze(1)]
        found.append(torch.cat([rows_found, *losses], dim=1))
    measured = torch.cat(found, dim=-1)
    for number, state in enumerate(changed):
        lost = ~measured[number].isfinite().all(0) & state.isfinite().all(-1).to(measured.device)
        if lost.any():
            at = lost.to(dense.device)
            again = _by_rows(
                (scorer, readers[1 + number]),
                (dense[at], state[at]),
                temperature,
                None if wanted is None else wanted.to(at.device)[at],
            )
            measured[number, :, lost] = again.to(measured)
    return measured


def _tiles(readers: Sequence[Scorer], rows: Sequence[torch.Tensor], columns: int) -> Iterator[torch.Tensor]:
    """Logits of `rows` (each positions × width) by their `readers`, one tile a time: states × positions × columns.

    Consecutive states with the same reader share one product.
    """
    by_reader = groupby(zip(readers, rows, strict=True), itemgetter(0))
    groups = [(reader, [state for _, state in some]) for reader, some in by_reader]
    by_state = methodcaller("unflatten", 0, (-1, len(rows[0])))
    # A map, unlike a loop, keeps no tile while the next one is formed.
    each = [
        map(by_state, reader.tiles(torch.cat([s.to(states[0]) for s in states]), columns)) for reader, states in groups
    ]
    if len(each) == 1:
        return each[0]
    return (torch.cat([tile.to(tiles[0].device) for tile in tiles]) for tiles in zip(*each, strict=True))


class _Tile:
    """Logits of one tile, the dense ones first and then those of every change: (1 + changes) × rows × columns.

    With `h` the largest dense logit of a row, `z = logits − h` and `p̂ = exp(z/T)` of the dense logits, float64.
    """

    def __init__(self, logits: torch.Tensor, temperature: float) -> None:
        require_numbers(logits[0], DENSE_LOGITS)
        self.changed, self.temperature = logits[1:], temperature
        self.height, self.column = _largest(logits)
        self.there = lift(self.changed.take_along_dim(self.column[0][None, :, None], -1))
        self.z = lift(logits[0]) - self.height[0].unsqueeze(-1)
        self.p = (self.z / temperature).exp_()

    def sums(self) -> torch.Tensor:
        """h, its column, `Σ p̂` and `Σ p̂²`: (4, rows)."""
        squares = torch.linalg.vecdot(self.p, self.p)
        return torch.stack([self.height[0], lift(self.column[0]), self.p.sum(-1), squares])

    def picked(self, before: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Changed logits (changes, rows) in `column` (rows,) of this tile; where that is outside, `before`."""
        inside = (column >= 0) & (column < self.changed.shape[-1])
        there = column.clamp(0, self.changed.shape[-1] - 1).expand(self.changed.shape[:-1]).unsqueeze(-1)
        return torch.where(inside, lift(self.changed.gather(-1, there).squeeze(-1)), before)

    def sums_of(self, part: slice, memory: torch.Tensor) -> torch.Tensor:
        """Sums for some of the changes: (9, changes, rows).

        With `c` the d in the column of h and `v = d − c`: the largest changed logit, its column, c, `Σ p̂ v`, `Σ p̂
        v²`, `Σ p̂ (e^v − 1)`, `Σ p̂ v (e^v − 1)`, `Σ p̂² v` and `Σ p̂² v²`. Intermediates use the buffer `memory`,
        `_STEPS` numbers per entry, because allocating it for each call costs as much as the exponentials.
        """
        logits, there = self.changed[part], self.there[part]
        changes, rows, columns = logits.shape
        steps = memory[: _STEPS * logits.numel()].view(rows, changes, _STEPS, columns)
        v, grown, weighted = steps.unbind(2)
        v.copy_(logits.transpose(0, 1)).sub_(there.transpose(0, 1)).sub_(self.z.unsqueeze(1))
        if self.temperature != 1:  # saves a pass over v
            v.div_(self.temperature)
        torch.expm1(v, out=grown)
        torch.mul(v, self.p.unsqueeze(1), out=weighted)
        # Row times matrix: matrix times column takes six times as long.
        of_each = steps.flatten(0, 1)
        by_p = torch.bmm(self.p.unsqueeze(1), steps.flatten(1, 2).mT).unflatten(-1, (changes, _STEPS)).squeeze(1)
        by_pv = torch.bmm(of_each[:, 2:], of_each.mT).unflatten(0, (rows, changes)).squeeze(2)
        first, growth, first_r = by_p.permute(2, 1, 0)
        second, turned, second_r = by_pv.permute(2, 1, 0)
        height, column = self.height[1:][part], self.column[1:][part]
        centre = (there.squeeze(-1) - self.height[0]) / self.temperature
        return torch.stack([height, lift(column), centre, first, second, growth, turned, first_r, second_r])


def _whole_vocabulary(
    dense: torch.Tensor, changed: torch.Tensor, temperature: float, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the sums of all tiles, (tiles, 4, rows) and (tiles, 9, changes, rows).

    Returns the measures, (changes, 5, rows), and `log Σ e^{z'/T}`, (changes, rows).
    """
    height, _, mass, mass_r = dense.unsqueeze(2).unbind(1)
    _, _, centre, *of_p, first_r, second_r = changed.unbind(1)
    weight = ((height - height.amax(0)) / temperature).exp()
    weight_r = weight.square() / (weight.square() * mass_r).sum(0)
    total = (weight * mass).sum(0)
    weight = weight / total
    p, r = weight * mass, weight_r * mass_r
    first, second, grown, turned = (weight * x for x in of_p)
    first_r, second_r = weight_r * first_r, weight_r * second_r

    mean = (p * centre + first).sum(0)
    s = centre - mean  # u = v + s
    more, times = s.expm1(), s.exp()
    mean_u = (first + p * s).sum(0)  # zero up to rounding, which enters in second order only
    variance = (second + 2 * s * first + p * s.square()).sum(0)
    excess = (times * grown + more * p).sum(0)
    kl = excess.log1p() - mean_u
    turned = (times * (turned + s * grown) + more * (first + s * p)).sum(0)
    reverse = (turned + mean_u) / (1 + excess) - excess.log1p()
    mean_r = (first_r + s * r).sum(0)
    by_r = (second_r + 2 * s * first_r + r * s.square()).sum(0) - mean_r.square()
    flipped = _top(changed[:, :2], columns) != _top(dense[:, :2].unsqueeze(2), columns)
    normaliser = height.amax(0) / temperature + total.log() + mean + excess.log1p()
    return torch.stack([variance / 2, kl, reverse, flipped.to(kl), by_r / 2], dim=1), normaliser


def _largest(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entry of every row (…, columns), float64, and its first column.

    Takes the maximum of runs of columns first, because `amax` is vectorised and `argmax` is not.
    """
    if z.shape[-1] % _RUN:
        column = z.argmax(-1)
        return lift(z.take_along_dim(column.unsqueeze(-1), -1).squeeze(-1)), column
    runs = z.unflatten(-1, (-1, _RUN))
    largest = runs.amax(-1)
    run = largest.argmax(-1)
    column = run * _RUN + runs.take_along_dim(run[..., None, None], -2).squeeze(-2).argmax(-1)
    return lift(largest.amax(-1)), column


def _top(largest: torch.Tensor, columns: int) -> torch.Tensor:
    """The most likely token over all tiles, from the largest entry of each tile and its column."""
    height, column = largest.unbind(1)
    tile = height.argmax(0)
    return tile * columns + column.take_along_dim(tile.unsqueeze(0), 0).squeeze(0)


def _by_rows(
    readers: tuple[Scorer, Scorer],
    states: tuple[torch.Tensor, torch.Tensor],
    temperature: float,
    wanted: torch.Tensor | None,
) -> torch.Tensor:
    """`measures` of one change, (5 or 6, positions), from whole rows of logits, one position after the other."""
    blocks = []
    for number, rows in enumerate(zip(*(state.split(1) for state in states), strict=True)):
        z, changed = (reader.logits(row) for reader, row in zip(readers, rows, strict=True))
        log_p, log_q = log_softmax(z, temperature), log_softmax(changed.to(z.device), temperature)
        flipped = (z.argmax(-1) != changed.to(z.device).argmax(-1)).to(log_p)
        by_r = variance_r(squared(log_p), log_q - log_p)
        loss = [] if wanted is None else [-log_q[:, wanted[number]]]
        blocks.append(torch.stack([*divergences(log_p, log_q), flipped, by_r, *loss]))
    return torch.cat(blocks, dim=-1)
