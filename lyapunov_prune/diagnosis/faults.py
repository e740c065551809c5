"""What can have been done to a matrix by mistake: each fault rebuilds the file's numbers from the dense model's.

A fault is found if the dense numbers, changed by it, are the file's up to rounding, where unchanged they are not. The
threshold is that of `Case.fits`; an honest file has no matrix that such a change explains, so there are no false alarms
but by chance, and none was seen (docs/diagnosis.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from lyapunov_prune.diagnosis.compared import BLOCK, CLIP, Compared
from lyapunov_prune.diagnosis.sides import Sides, TensorPlace, read, tensor_of
from lyapunov_prune.models.roles import role

_SAMPLED = 256  # rows that are looked for elsewhere
_LENGTH = 4096  # numbers of a row by which it is looked for
_RANK = 64  # the most of an adapter
_BINS = 256
_OF_NEIGHBOURS = "of its neighbours in the layer too, as a fused tensor that was split in another order"
_ALONG = 0.75  # cosine of rows from which on one is the other but for scales; unrelated ones have 0.4 at most


@dataclass(frozen=True)
class Match:
    """A change that explains the file's numbers: its kind, and a phrase that follows the tensor's name.

    Tensors with the same `kind` and `phrase` are told in one sentence. `source` names what the numbers are in the dense
    model, for a tensor that is another one: its name there and its expert.
    """

    kind: str
    phrase: str
    left: float
    source: tuple[str, int | None] | None = None


@dataclass(frozen=True, eq=False)
class Case:
    """The part of a matrix that is off: dense W and file V, (rows, columns) float32, with a vector as one column.

    `parts` holds the numbers of the `rows` or `columns` of that part in the whole matrix, or (row, block) of single
    `blocks` of 32 numbers, which are then one a row of W and V; it is empty if the case is the whole.
    """

    sides: Sides
    place: TensorPlace
    found: Compared
    W: torch.Tensor
    V: torch.Tensor
    parts: Mapping[str, np.ndarray]

    @property
    def rows(self) -> np.ndarray | None:
        return self.parts.get("rows")

    @property
    def columns(self) -> np.ndarray | None:
        return self.parts.get("columns")

    @property
    def blocks(self) -> np.ndarray | None:
        return self.parts.get("blocks")

    @cached_property
    def size(self) -> float:
        return max(float(self.W.norm()), 1e-30)

    @cached_property
    def error(self) -> float:
        return self.left(self.W)

    @property
    def allowed(self) -> float:
        """The most that honest storage does to this part."""
        return self.found.allowed if self.whole else max(self.found.allowed, 1.6 * float(np.median(self.found.rows)))

    @property
    def vector(self) -> bool:
        return len(self.found.shape) < 2

    @property
    def whole(self) -> bool:
        return not self.parts

    def left(self, X: torch.Tensor) -> float:
        """What `X` leaves unexplained, ‖V − X‖ / ‖W‖."""
        return float((self.V - X).norm()) / self.size

    def fits(self, left: float, scale: float = 1.0) -> bool:
        """Whether so little is left that storage explains it, or a quarter of the error: both at most half of it.

        A change that leaves half of V itself explains nothing: that V is small.
        """
        known = min(self.error, float(self.V.norm()) / self.size)
        return left <= 0.5 * known and left <= max(self.allowed * scale, 0.2 * self.error)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of another matrix of this shape that lies where this case does."""
        return part_of(whole, self.parts)

    def match(self, kind: str, phrase: str, X: torch.Tensor) -> Match | None:
        """The match of a change that makes X of W; None if it does not fit."""
        left = self.left(X)
        return Match(kind, phrase, left) if self.fits(left) else None


def part_of(whole: torch.Tensor, parts: Mapping[str, np.ndarray]) -> torch.Tensor:
    """These rows, columns or blocks of a matrix, of which a vector is one column; all of it if there are none."""
    whole = whole.reshape(len(whole), -1)
    if "blocks" in parts:
        return whole.reshape(len(whole), -1, BLOCK)[tuple(parts["blocks"].T)]
    return whole[parts.get("rows", slice(None))][:, parts.get("columns", slice(None))]


def constant(case: Case) -> Match | None:
    """A matrix, rows or blocks hold one value, which may be zero, or one row again and again; the dense ones differ.

    Statistic: the range of V, 0 for nine rows or blocks in ten, as a run begins inside one; for rows that are alike
    their distance from the mean row. Threshold: 1e-6 of the largest number, and 5 % of ‖V‖. Honest storage gives a
    block one value only if all are below half of its step.
    """
    V = case.V.T if case.vector else case.V
    if V.shape[1] < 2 or float(case.W.std()) <= 1e-6 * float(case.W.abs().max()):
        return None
    largest = V.abs().amax(1)
    still = V.amax(1) - V.amin(1) <= 1e-6 * largest
    if float(still.float().mean()) < 0.9:
        alike = len(V) > 2 and float((V - V.mean(0)).norm()) < 0.05 * float(V.norm())
        return Match("constant", "{is} all alike", 1.0) if alike and not case.vector and case.rows is not None else None
    V, largest = V[still], largest[still]
    if not bool(largest.any()):
        return Match("zero", "{is} zero", 1.0)
    same = float(V.max() - V.min()) <= 1e-6 * float(largest.max())
    return Match("constant", f"{{holds}} one constant, {float(V.max()):.4g}" if same else "{holds} constants", 1.0)


def one_number(case: Case) -> Match | None:
    """One number of the vector, row or block is another: a bit that flipped, or an integer that overflowed.

    Statistic: the share of ‖V − W‖² in one number, the least of all blocks. Threshold: 0.95, of 16 numbers at least,
    and a change of twice the typical number.
    """
    W, V = (tensor.T if case.vector else tensor for tensor in (case.W, case.V))
    D = (V - W).square()
    most = D.max(1)
    share = float((most.values / D.sum(1).clamp_min(1e-30)).min())
    row = int(most.values.argmax())
    if D.shape[1] < 16 or case.columns is not None or share < 0.95 or D.max() < 4 * case.size**2 / W.numel():
        return None
    v, w = (float(each[row, most.indices[row]]) for each in (V, W))
    return Match("number", f"{{holds}} a number that is another, {v:.3g} where DENSE has {w:.3g}", 0.0)


def shift(case: Case) -> Match | None:
    """A constant was added: norms stored as w − 1 in one convention and read as w in another.

    Statistic: what W + mean(V − W) leaves of V. Threshold: `Case.fits`, and a constant of 2 % of the typical number.
    """
    c = float((case.V - case.W).mean(dtype=torch.float64))
    typical = case.size / max(1, case.W.numel()) ** 0.5
    left = case.left(case.W + c)
    if abs(c) < 0.02 * typical or not case.fits(left):
        return None
    if (by_group := zero_points(case)) is not None and by_group.left < 0.92 * left:
        return by_group
    c = float(round(c)) if abs(c - round(c)) < 5e-3 and round(c) else c
    return Match("shift", f"{{is}} that of DENSE {'plus' if c > 0 else 'minus'} {abs(c):.3f}", left)


def scale(case: Case) -> Match | None:
    """All numbers were multiplied by one factor; −1 is an inverted sign.

    Statistic: what cW with c = ⟨V, W⟩ / ‖W‖² leaves of V. Threshold: `Case.fits`, and |c − 1| above 3 %.
    """
    factor, left = _factors(case, case.W, case.V, (0, 1))
    c = float(factor)
    if left is None or abs(c - 1) < 0.03:
        return None
    if abs(c + 1) < 0.05:
        return Match("sign", "{has} the sign of every number inverted", left)
    return Match("scale", f"{{is}} that of DENSE times {c:.2g}", left)


def row_scales(case: Case) -> Match | None:
    """Every row was multiplied by a factor of its own, or every column: scales that belong to others, or were lost.

    Statistic: what diag(c)W or W diag(c) with the best factors leaves. Threshold: `Case.fits`, with at least 16
    numbers a factor.
    """
    for axis, what in (1, "row"), (0, "column"):
        c, left = _factors(case, case.W, case.V, axis)
        if left is not None and case.W.shape[axis] >= 16 and not case.vector:
            if bool((c.abs().sub(1).abs() < 0.1).all()):
                return Match("sign", f"{{has}} the sign of some {what}s inverted", left)
            return Match("scale", f"{{has}} each {what} times a factor of its own", left)
    return None


def _factors(
    case: Case, w: torch.Tensor, v: torch.Tensor, axis: int | tuple[int, int]
) -> tuple[torch.Tensor, float | None]:
    """The best factors of w along an axis, and what they leave; None if they do not fit."""
    c = (v * w).sum(axis, keepdim=True) / w.square().sum(axis, keepdim=True).clamp_min(1e-30)
    left = float((v - c * w).norm()) / case.size
    return c, left if case.fits(left, max(1.0, float(c.abs().median()))) else None


def transposed(case: Case) -> Match | None:
    """The matrix is stored as its transpose, or as parts of its rows one after the other: joined at the wrong axis.

    Statistic: what Wᵀ leaves, and the same of k parts, k = 2, 4 and 8. Threshold: `Case.fits`.
    """
    if not case.whole or case.vector or min(case.W.shape) < 2:
        return None
    m, n = case.W.shape
    made = [("{is} transposed", case.W.T)] + [
        (f"{{holds}} its {k} parts joined at the wrong axis", case.W.view(m, k, -1).transpose(0, 1))
        for k in (2, 4, 8)
        if n % k == 0
    ]
    return next(filter(None, (case.match("transposed", said, X.reshape(m, n)) for said, X in made)), None)


def other_type(case: Case) -> Match | None:
    """The bits of numbers were read as another type: bfloat16 as float16, or the other way round.

    Statistic: what the dense numbers read so leave of V. Threshold: `Case.fits`.
    """
    made = (
        ("bfloat16 read as float16", case.W.bfloat16().view(torch.float16)),
        ("float16 read as bfloat16", case.W.half().view(torch.bfloat16)),
    )
    return next(filter(None, (case.match("type", f"{{holds}} bytes of {said}", X.float()) for said, X in made)), None)


def other_tensor(case: Case) -> Match | None:
    """The numbers are those of another tensor of the dense model: another layer, expert, projection or norm.

    Statistic: the least that a tensor of the same shape leaves. Threshold: `Case.fits`. Of a streamed model only the
    tensors of the same layer are tried.
    """
    best: tuple[float, tuple[str, int | None]] | None = None
    own = case.sides.dense_name(case.place)
    whole = tuple(tensor_of(case.sides.dense, own).shape)
    for name in case.sides.alike.get(whole, ()):
        for expert in range(whole[0]) if len(whole) == 3 else (None,):
            if (name, expert) == (own, case.place.expert) or case.sides.away(name):
                continue
            left = case.left(case.part(read(case.sides.dense, name, expert)))
            if best is None or left < best[0]:
                best = left, (name, expert)
    return Match("other tensor", "{is} that of", *best) if best is not None and case.fits(best[0]) else None


def permuted_rows(case: Case) -> Match | None:
    """The rows are in another order: the other rotary layout, heads or halves exchanged, rows of tokens shifted.

    Statistic: what is left of 256 rows by the dense rows with the largest cosine. Threshold: `Case.fits`; then the
    order is compared with the known ones.
    """
    return _permuted(case, 0)


def permuted_columns(case: Case) -> Match | None:
    """The columns are in another order: nibbles unpacked in the other order, heads of a value exchanged.

    Statistic and threshold: as for rows.
    """
    return _permuted(case, 1)


def _permuted(case: Case, axis: int) -> Match | None:
    what = ("rows", "columns")[axis]
    if case.blocks is not None:
        return None
    if case.vector:
        return _permuted_vector(case) if axis == 0 else None
    W, V = case.sides.pair(case.place)
    if axis:
        W, V = W.T, V.T
    if len(W) < 2 or W.shape[1] < 8:
        return None
    numbers = (case.rows, case.columns)[axis]
    some = np.arange(len(W)) if numbers is None else numbers
    some = some[np.unique(np.linspace(0, len(some) - 1, _SAMPLED).astype(int))]
    cut = slice(None, None, max(1, W.shape[1] // _LENGTH))
    every = [W, *(_siblings(case) if axis == 0 and case.whole else ())]
    w, v = torch.cat([each[:, cut] for each in every]), V[some][:, cut]
    cosines = (v / v.norm(dim=1, keepdim=True).clamp_min(1e-30)) @ (w / w.norm(dim=1, keepdim=True).clamp_min(1e-30)).T
    where = cosines.argmax(1)
    before, after = (float((v - w[at]).norm()) / max(float(v.norm()), 1e-30) for at in (torch.from_numpy(some), where))
    order = where.numpy()
    moved = order != some
    # Rows whose scales stayed behind are no copies: their directions tell.
    turned = float((cosines.amax(1) > _ALONG).float().mean()) > 0.95 and float(moved.mean()) > 0.5
    if (
        not moved.any()
        or before <= 0.3
        or not (turned or (after <= 0.5 * before and after <= max(case.found.allowed, 0.2 * before)))
    ):
        return None
    if order.max() >= len(W):
        return Match("permuted", f"{{holds}} rows {_OF_NEIGHBOURS}", 0.0)
    left = min(after, 0.2 * before)  # what is left of directions is the scales'
    if len(some) > 2 and len(np.unique(order)) <= 0.8 * len(order):
        return Match("repeated", f"{{holds}} some of its {what} twice, in place of others", left)
    return Match("permuted", _order(case, some[moved], order[moved], len(W), what), left)


def _permuted_vector(case: Case) -> Match | None:
    """A vector in another order, by its sorted numbers, or made of numbers of its neighbours in the layer."""
    if not case.whole or len(case.W) < 4 or case.error < 0.02:
        return None
    others = torch.cat([case.W.ravel(), *(other.ravel() for other in _siblings(case))])
    if len(others) > len(case.W) and float(torch.isin(case.V, others).float().mean()) > 0.95 > float(
        torch.isin(case.V, case.W).float().mean()
    ):
        return Match("permuted", f"{{holds}} numbers {_OF_NEIGHBOURS}", 0.0)
    left = float((case.V.sort(0).values - case.W.sort(0).values).norm()) / case.size
    return Match("permuted", "{has} its numbers in another order", left) if left < min(2e-3, 0.1 * case.error) else None


def _siblings(case: Case) -> Iterator[torch.Tensor]:
    """The other dense matrices of this width in this layer; of a vector its other vectors of this kind."""
    sides, own = case.sides, case.sides.dense_name(case.place)
    if case.place.own is None:
        return
    for shape, names in sides.alike.items():
        for name in names if len(shape) == len(case.found.shape) and shape[1:] == case.found.shape[1:] else ():
            same = not case.vector or name.rpartition(".")[2] == own.rpartition(".")[2]
            if name != own and same and sides.dense.structure.layer_of(name) == case.place.own:
                yield read(sides.dense, name)


def _order(case: Case, at: np.ndarray, order: np.ndarray, count: int, what: str) -> str:
    """The phrase for rows or columns `at` that are the dense ones `order`."""
    ahead = (order - at) % count
    if len(at) == 1:
        return f"{{is}} {what[:-1]} {order[0]} of DENSE"
    if len(at) == 2 and set(at) == set(order):
        return f"{{has}} {what} {at.min()} and {at.max()} exchanged"
    size = head_size(case)
    layouts = (
        (size, f"{{has}} {what} permuted as by the other rotary layout"),
        (BLOCK, f"{{has}} {what} of each block of {BLOCK} in the order of the other packing of 4 bits"),
        (count, f"{{has}} its {what} interleaved, as two matrices that were stacked, or the other way round"),
    )
    for unit, said in layouts:
        if unit and count % unit == 0 and (unit < count or unit != size):
            inside, half = at % unit, unit // 2
            if any(
                np.mean(at - inside + inner == order) > 0.95
                for inner in ((inside % 2) * half + inside // 2, (inside % half) * 2 + inside // half)
            ):
                return said
    if np.mean(ahead == np.bincount(ahead).argmax()) > 0.9:
        by = int(np.bincount(ahead).argmax())
        if 2 * by == count:
            return f"{{has}} the two halves of its {what} exchanged"
        return f"{{has}} its {what} shifted by {by if by <= count // 2 else count - by}"
    for unit in (count // k for k in range(2, count // 2) if count % k == 0):
        if np.mean(order % unit == at % unit) > 0.95 and _blocks_move(at // unit, order // unit):
            numbers = sorted(set((at // unit).tolist()))
            units = "heads" if unit == size and not _in_mlp(case.place) else f"blocks of {unit} {what}"
            return f"{{has}} {units}{f' {_listed(numbers)}' if len(numbers) < 9 else ''} in another order"
    return f"{{has}} its {what} permuted"


def _in_mlp(place: TensorPlace) -> bool:
    return role(place.name.removesuffix(".weight")).startswith("mlp")


def _blocks_move(a: np.ndarray, b: np.ndarray) -> bool:
    return len(set(zip(a.tolist(), b.tolist(), strict=True))) == len(set(a.tolist()))


def head_size(case: Case) -> int | None:
    config = case.sides.file.structure.config
    size = getattr(config, "head_dim", None)
    heads, width = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    return size or (width // heads if heads and width else None)


def zero_points(case: Case) -> Match | None:
    """Each block of 32 numbers is off by a constant of its own: zero points read one too high or too low.

    Statistic: what W plus the mean of V − W of each block leaves. Threshold: `Case.fits`. The constants are told in
    steps of rounding, read from V.
    """
    made = _by_block(case)
    if made is None:
        return None
    w, v = made
    c = (v - w).mean(-1, keepdim=True)
    left = float((v - w - c).norm()) / case.size
    if not case.fits(left):
        return None
    gaps = v.sort(-1).values.diff(dim=-1)
    step = gaps.where(gaps > 1e-6 * v.abs().amax(-1, keepdim=True), torch.inf).amin(-1)
    steps = float((c.squeeze(-1) / step)[step.isfinite()].median()) if bool(step.isfinite().any()) else 0.0
    by = f", as if zero points were {abs(round(steps))} too {'low' if steps > 0 else 'high'}" if round(steps) else ""
    return Match("zero point", f"{{has}} every group of numbers off by a constant of its own{by}", left)


def block_scales(case: Case) -> Match | None:
    """Each block of 32 numbers has a factor of its own: scales of neighbouring blocks were exchanged or shifted.

    Statistic: what the best factor of each block leaves. Threshold: `Case.fits`.
    """
    made = _by_block(case)
    if made is None:
        return None
    _, left = _factors(case, *made, -1)
    if left is None:
        return None
    return Match("block scale", f"{{has}} blocks of {BLOCK} numbers with wrong scales", left)


def _by_block(case: Case) -> tuple[torch.Tensor, torch.Tensor] | None:
    if case.vector or case.columns is not None or case.W.shape[1] % BLOCK or case.W.shape[1] < 2:
        return None
    w, v = (tensor.reshape(len(tensor), -1, BLOCK) for tensor in (case.W, case.V))
    return w, v


def clipped(case: Case) -> Match | None:
    """Numbers beyond a limit were cut off: blocks that saturate, or a cast that overflows and is clamped.

    Statistic: what W clamped to the range of V leaves. Threshold: `Case.fits`, with 0.1 % of the numbers clamped, to
    less than 0.48 of the largest: tools that search a clip, as AWQ does, go to half.
    """
    low, high = float(case.V.min()), float(case.V.max())
    if max(-low, high) > CLIP * float(case.W.abs().max()):
        return None
    X = case.W.clamp(low, high) if low < high else case.W
    if not 1e-3 <= float((X != case.W).float().mean()) < 0.5:  # ternary: more
        return None
    return case.match("saturated", f"{{is}} cut off at {low:.3g} and {high:.3g}", X)


def _listed(numbers: list[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def code_table(case: Case) -> Match | None:
    """Each number is a function of the dense one by the scale of its block: integers of 4 bits read by another table,
    without their sign, or wrapped around.

    Statistic: what the means of V in 256 bins of W leave, both by the largest |W| of 32 or 128 numbers or a row.
    Threshold: `Case.fits`, with 16 numbers a bin, and a function that falls by a tenth of its range between two of
    16 bins, as rounding and cutting off do not.
    """
    if case.vector or not case.whole or case.W.numel() < 16 * _BINS:
        return None
    for size in (BLOCK, 4 * BLOCK, case.W.shape[1]):
        if case.W.shape[1] % size == 0:
            w, v = (tensor.reshape(-1, size) for tensor in (case.W, case.V))
            top = w.abs().amax(1, keepdim=True).clamp_min(1e-30)
            bins, means = _means(v / top, w / top, _BINS)
            X = (top * means[bins]).view_as(case.W)
            coarse = _means(v / top, w / top, 16)[1]
            falls = bool((coarse.diff() < -0.1 * (coarse.max() - coarse.min())).any())
            said = "{has} its integers read by another table of values, or by another sign"
            if falls and (match := case.match("codes", said, X)):
                return match
    return None


def _means(v: torch.Tensor, at: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bin of each number by `at`, from −1 to 1, and the mean of every bin; that of an empty one is its place."""
    bins = ((at + 1) * (count / 2 - 1e-3)).long()
    sums = torch.zeros(count).index_add_(0, bins.ravel(), v.ravel())
    counts = bins.ravel().bincount(minlength=count)
    return bins, torch.where(counts > 0, sums / counts.clamp_min(1), torch.linspace(-1, 1, count))


def rotated(case: Case) -> Match | None:
    """The matrix was multiplied by an orthogonal one from one side: a rotation (Hadamard) whose inverse is missing.

    Statistic: the correlation between the products of 256 rows with each other in W and in V, or of columns. Threshold:
    0.5 where both are of one size; that of unrelated matrices is within 0.1 of 0.
    """
    size = float(case.V.norm()) / case.size
    if not case.whole or case.vector or case.found.cosine > 0.5 or min(case.W.shape) < BLOCK or not 0.8 < size < 1.25:
        return None
    for axis, what in enumerate(("columns", "rows")):
        X = torch.stack([case.W, case.V]).transpose(1, 1 + axis)
        X = X[:, torch.linspace(0, X.shape[1] - 1, min(_SAMPLED, X.shape[1])).long()]
        products = (X @ X.mT)[:, *torch.triu_indices(X.shape[1], X.shape[1], 1)]
        if float(torch.corrcoef(products)[0, 1]) > 0.5:
            return Match("rotated", f"{{has}} its {what} rotated: their lengths and angles are those of DENSE", 0.0)
    return None


def initialised(case: Case) -> Match | None:
    """The numbers are random, as a new model has them: the tensor was not in the checkpoint.

    Statistic: the cosine of V and W, and the standard deviation of V by that of the config. Thresholds: 0.1, and 5 %.
    """
    std = getattr(case.sides.file.structure.config, "initializer_range", None)
    cosine = float((case.V * case.W).sum()) / max(float(case.V.norm()) * case.size, 1e-30)
    if case.vector or not std or abs(cosine) > 0.1 or abs(float(case.V.std()) / std - 1) > 0.05:
        return None
    return Match("initialised", f"{{holds}} random numbers of the standard deviation of new models, {std:.2g}", 0.0)


def low_rank(case: Case) -> Match | None:
    """An adapter was merged with a scale far too large, or stands alone, without the matrix that it belongs to.

    Statistic: the share of ‖V − W‖² or ‖V‖² in its 64 largest singular values (an eighth of them at most). Threshold:
    0.9, where the error is above 0.8 of ‖W‖. A truncated decomposition of W is no fault: it has a cosine above 0.5.
    """
    rank = min(_RANK, min(case.W.shape) // 8)
    if not case.whole or rank < 2 or case.error < 0.8:
        return None
    for D, said in (
        (case.V - case.W, "{is} that of DENSE plus a matrix of low rank that is as large"),
        (case.V, "{is} a matrix of low rank alone"),
    ):
        if D is case.V and case.found.cosine > 0.5:
            return None
        kept = torch.svd_lowrank(D, rank + 4, niter=2)[1][:rank].norm()
        if float(kept) ** 2 > 0.9 * float(D.norm()) ** 2:
            return Match("adapter", said, 0.0)
    return None
