"""One pass over a matrix of both models: how far it is off, where, and how far its own storage can put it off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 32  # numbers in a row that share a scale in most types
_WIDTH = 16  # numbers, half a block, that are sure to share a scale
_SAMPLED = 2048  # blocks from which the step of rounding is read
_SPARSE = 0.25  # share of zeros in a matrix from which on they are taken as pruned
_NUMBERS = 16  # in a row or column from which on it is compared with others
_PRUNED = 1.5  # error of a row or column of a pruned matrix from which on it is told
_CUT = 0.4  # of a row or column, which cutting off its largest numbers may take
_TURNED = 3.0  # factor of the numbers that pruning left, from which on they are not W's
CLIP = 0.48  # of the largest number, to which tools that search a clip (AWQ: to half) may cut it
_AT_END = 0.9  # of the largest number of a block, from which on a number may be one that was cut off there
_AT_ONCE = 2**22  # numbers
FLOOR = 0.004  # relative error of a cast to bfloat16, twice over


@dataclass(frozen=True, eq=False)
class Compared:
    """The dense matrix W and the file's V, both (m, n); a vector has one column.

    `error` is ‖V − W‖ / ‖W‖ (Frobenius), `stored` what the storage of V explains of it (`stored_error`), `dense_stored`
    what that of W does, and `cosine` ⟨V, W⟩ / ‖V‖‖W‖. `rows` and `columns` hold the errors by row and column, relative
    to their norm, or to a tenth of the mean norm if that is more; `row_gains` and `column_gains` are ⟨v, w⟩ / ‖w‖².
    `blocks` lists (row, block) of blocks of 32 numbers whose error is far beyond that of others. `row_off`,
    `column_off` and `block_off` are squares of errors, `size` is ‖W‖, and `projected` ⟨V, W − V⟩ / ‖V‖‖W − V‖, 0 for a
    projection; what was cut off at the end of a block, as AWQ does, is no error there. `bad` counts numbers that are
    not finite, and `sparse` says whether V was pruned; `gone` is then the mean square of what was pruned over that of
    all, in the median of columns: below 1 if small numbers go, as by every score with a magnitude in it.
    """

    shape: tuple[int, ...]
    error: float
    stored: float
    dense_stored: float
    cosine: float
    projected: float
    rows: np.ndarray
    columns: np.ndarray
    row_gains: np.ndarray
    column_gains: np.ndarray
    blocks: np.ndarray
    bad: int
    sparse: bool
    size: float
    row_off: np.ndarray
    column_off: np.ndarray
    block_off: float
    gone: float = 0.0

    @property
    def allowed(self) -> float:
        """The most that honest storage does to the whole matrix."""
        return 1.6 * self.stored + FLOOR

    @property
    def excess(self) -> float:
        """The error in units of what storage explains, below 1 for an honest one."""
        return self.error / self.allowed

    def parts(self) -> list[tuple[float, float, dict[str, np.ndarray]]]:
        """Where it may be off alone: the share of the numbers, the error of all others by ‖W‖, and the place."""
        m, n = len(self.rows), len(self.columns)
        rows, columns = self.far_rows, self.far_columns
        places = (
            (len(rows) / m, np.delete(self.row_off, rows).sum(), {"rows": rows}),
            (len(columns) / n, np.delete(self.column_off, columns).sum(), {"columns": columns}),
            (len(self.blocks) * BLOCK / (m * n), self.row_off.sum() - self.block_off, {"blocks": self.blocks}),
        )
        return [(share, float(np.sqrt(max(0.0, left))) / self.size, where) for share, left, where in places]

    @property
    def far_rows(self) -> np.ndarray:
        return _far(self, self.rows, self.row_off, self.row_gains, len(self.columns))

    @property
    def far_columns(self) -> np.ndarray:
        return _far(self, self.columns, self.column_off, self.column_gains, len(self.rows))

    @property
    def turned(self) -> bool:
        """Whether the numbers that pruning left are not those of W at all."""
        return self.sparse and not 1 / _TURNED < float(np.median(self.row_gains)) < _TURNED


def _far(found: Compared, errors: np.ndarray, squares: np.ndarray, gains: np.ndarray, numbers: int) -> np.ndarray:
    """The numbers of rows or columns that are off by far more than others: by size, or by a factor."""
    if len(found.shape) < 2 or len(errors) < 4 or numbers < _NUMBERS:
        return np.zeros(0, int)
    usual = float(np.median(errors))
    ordinary = float(np.median(squares))  # small numbers beside large ones are rounded as coarsely
    typical = float(np.median(gains))
    spread = float(np.median(np.abs(gains - typical)))
    if found.sparse:  # what a method makes up for in the numbers that are left is no fault
        return np.flatnonzero(errors > _PRUNED)
    off = (errors > np.maximum(4 * usual, max(found.allowed, 0.05))) & (squares > 4 * ordinary)
    ahead = gains - typical  # numbers cut off at the ends of their integers, as AWQ does, are some less
    turned = ((ahead > max(12 * spread, 0.12)) | (-ahead > max(12 * spread, _CUT))) & (errors > max(1.5 * usual, FLOOR))
    return np.flatnonzero(off | (turned & (squares > 3 * ordinary)))


def compare(dense: torch.Tensor, file: torch.Tensor) -> Compared:
    """The statistics of V = `file` against W = `dense`, both float32, from one pass over their numbers."""
    shape = tuple(dense.shape)
    W, V = (tensor.reshape(len(tensor), -1) for tensor in (dense, file))
    m, n = W.shape
    wide = n >= BLOCK and n % BLOCK == 0
    by_row, by_column, masked = np.zeros((4, m)), np.zeros((4, n)), np.zeros((3, n))
    blocks: list[np.ndarray] = []
    errors: list[np.ndarray] = []
    bad, pruned = 0, 0.0
    step = max(1, _AT_ONCE // n)
    filled = V.any(1)
    sparse = _is_sparse(V[filled] if bool(filled.any()) else V)
    for start in range(0, m, step):
        w, v = W[start : start + step], V[start : start + step]
        finite = v.isfinite()
        if not bool(finite.all()):
            bad += int((~finite).sum())
            v = v.where(finite, torch.zeros(()))
        if sparse:  # rows and columns are compared where they were not pruned
            kept = (v != 0) | ~filled[start : start + step, None]
            lost = w.where(~kept, torch.zeros(())).square()
            pruned += float(lost.sum(dtype=torch.float64))
            some = filled[start : start + step]
            masked += torch.stack(
                [each[some].sum(0, dtype=torch.float64) for each in (lost, w.square(), ~kept)]
            ).numpy()
            w = w.where(kept, torch.zeros(()))
        d = v - w
        if wide and not sparse:
            d = d.where(~_cut(w, v), torch.zeros(()))
        squares = d.square()
        parts = (w.square(), v.square(), v * w, squares)
        by_row[:, start : start + step] = torch.stack([part.sum(1, dtype=torch.float64) for part in parts]).numpy()
        by_column += torch.stack([part.sum(0, dtype=torch.float64) for part in parts]).numpy()
        if wide and not sparse:
            sums = [part.view(len(w), -1, BLOCK).sum(-1) for part in (squares, parts[0])]
            level = sums[1].mean(1, keepdim=True)
            ratio = (sums[0] / torch.maximum(sums[1], 0.1 * level).clamp_min(1e-30)).sqrt().numpy()
            errors.append(
                np.stack([each[:, :: max(1, ratio.shape[1] // 8)].ravel() for each in (ratio, sums[0].numpy())])
            )
            row, block = np.nonzero(ratio > 0.3)
            blocks.append(np.column_stack([row + start, block, ratio[row, block], sums[0].numpy()[row, block]]))
    ww, vv, vw, dd = by_row
    size = max(float(np.sqrt(ww.sum() + pruned)), 1e-30)
    norm = max(float(np.sqrt(vv.sum())), 1e-30)
    usual, ordinary = np.median(np.concatenate(errors, axis=1), axis=1) if errors else (0.0, 0.0)
    found = np.concatenate(blocks) if blocks else np.zeros((0, 4))
    far = found[(found[:, 2] > max(0.5, 5 * usual)) & (found[:, 3] > 9 * ordinary)]
    total = float(dd.sum()) + pruned
    return Compared(
        shape=shape,
        error=float(np.sqrt(total)) / size,
        stored=stored_error(W, V),
        dense_stored=stored_error(V, W),
        cosine=float(vw.sum()) / (size * norm),
        projected=float((vw - vv).sum()) / max(norm * total**0.5, 1e-30),
        rows=_relative(dd, ww),
        columns=_relative(by_column[3], by_column[0]),
        row_gains=vw / np.maximum(ww, 1e-30),
        column_gains=by_column[2] / np.maximum(by_column[0], 1e-30),
        blocks=far[:, :2].astype(int),
        bad=bad,
        sparse=sparse,
        size=size,
        row_off=dd,
        column_off=by_column[3],
        block_off=far[:, 3].sum(),
        gone=_gone(masked, int(filled.sum())) if sparse else 0.0,
    )


def _cut(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The numbers of W that V has cut off at the end of a block, in rows that keep half of their largest number."""
    a, b = w.abs(), v.abs()
    ends = b.view(len(b), -1, BLOCK)
    at_end = (ends >= _AT_END * ends.amax(-1, keepdim=True)).view(b.shape)
    return (
        at_end & (b.amax(1, keepdim=True) >= CLIP * a.amax(1, keepdim=True)) & (v * w > 0) & (b < a) & (b >= CLIP * a)
    )


def _gone(masked: np.ndarray, rows: int) -> float:
    """The median of columns that were pruned in part: mean square of what is gone by that of all."""
    lost, size, count = masked
    some = (count > 0.1 * rows) & (count < 0.9 * rows) & (size > 0)
    return float(np.median(lost[some] / size[some] * rows / count[some])) if rows >= _NUMBERS and some.any() else 0.0


def _relative(off: np.ndarray, size: np.ndarray) -> np.ndarray:
    floor = max(0.01 * float(size.mean()), 1e-30)
    return np.asarray(np.sqrt(off / np.maximum(size, floor)))


def _is_sparse(V: torch.Tensor) -> bool:
    """Whether enough of its numbers are zero to be pruned, and not all."""
    zeros = float((V == 0).float().mean())
    return _SPARSE < zeros < 0.98


def stored_error(W: torch.Tensor, V: torch.Tensor) -> float:
    """What the storage of V explains of ‖V − W‖ / ‖W‖, read from V itself: its step of rounding, and its zeros.

    In blocks of 16 numbers in a row, or in a column if it is more there, the smallest gap between two different ones is
    the step s, and rounding to a grid of step s has a mean square of s²/12. Numbers that are zero in V alone were
    pruned. 2,048 blocks are read each way.
    """
    return max(_stored_in(W, V), _stored_in(W.T, V.T)) if W.shape[1] > 1 else 0.0


def _stored_in(W: torch.Tensor, V: torch.Tensor) -> float:
    count = V.shape[1] // _WIDTH
    if count == 0:
        return 0.0
    chosen = torch.linspace(0, len(V) * count - 1, min(_SAMPLED, len(V) * count), dtype=torch.float64).long()
    columns = (chosen % count * _WIDTH).unsqueeze(1) + torch.arange(_WIDTH)
    rows = (chosen // count).unsqueeze(1)
    w, v = W[rows, columns], V[rows, columns]
    gaps = v.sort(1).values.diff(dim=1)
    steps = gaps.where(gaps > 1e-6 * v.abs().amax(1, keepdim=True), torch.inf).amin(1)
    steps = steps.where(steps.isfinite(), torch.zeros(()))
    pruned = w.where((v == 0) & (w.abs() > steps.unsqueeze(1)), torch.zeros(())).square().sum() * _is_sparse(v)
    size = w.square().sum().clamp_min(1e-30)
    return float((((steps.square() * (_WIDTH / 12)).sum() + pruned) / size).sqrt())
