"""What can have been done to a matrix by mistake: each fault rebuilds the file's numbers from the dense model's.

A fault is found if the dense numbers, changed by it, are the file's up to rounding, where unchanged they are not. The
threshold is that of `Case.fits`; an honest file has no matrix that such a change explains, so there are no false alarms
but by chance, and none was seen (docs/diagnosis.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from lyapunov_prune.diagnosis.compared import BLOCK, Compared
from lyapunov_prune.diagnosis.sides import Sides, TensorPlace, read, tensor_of

_SAMPLED = 256  # rows that are looked for elsewhere
_LENGTH = 4096  # numbers of a row by which it is looked for


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

    `rows` and `columns` number that part in the whole matrix, all of it if None. `blocks` says that W and V hold
    single blocks of 32 numbers, one a row.
    """

    sides: Sides
    place: TensorPlace
    found: Compared
    W: torch.Tensor
    V: torch.Tensor
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    blocks: np.ndarray | None = None

    @cached_property
    def size(self) -> float:
        return max(float(self.W.norm()), 1e-30)

    @cached_property
    def error(self) -> float:
        return self.left(self.W)

    @property
    def vector(self) -> bool:
        return len(self.found.shape) < 2

    @property
    def whole(self) -> bool:
        return self.rows is None and self.columns is None and self.blocks is None

    def left(self, X: torch.Tensor) -> float:
        """What `X` leaves unexplained, ‖V − X‖ / ‖W‖."""
        return float((self.V - X).norm()) / self.size

    def fits(self, left: float, scale: float = 1.0) -> bool:
        """Whether so little is left that storage explains it, or a quarter of the error: both at most half of it."""
        allowed = max(self.found.allowed, 1.6 * float(np.median(self.found.rows)) if not self.whole else 0.0) * scale
        return left <= 0.5 * self.error and left <= max(allowed, 0.2 * self.error)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of another matrix of this shape that lies where this case does."""
        return part_of(whole, self.rows, self.columns, self.blocks)

    def whole_pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.sides.pair(self.place)

    def match(self, kind: str, phrase: str, X: torch.Tensor, source: tuple[str, int | None] | None = None) -> Match:
        return Match(kind, phrase, self.left(X), source)


def part_of(
    whole: torch.Tensor, rows: np.ndarray | None, columns: np.ndarray | None, blocks: np.ndarray | None
) -> torch.Tensor:
    """These rows, columns or blocks of a matrix, of which a vector is one column."""
    whole = whole.reshape(len(whole), -1)
    if blocks is not None:
        return whole.reshape(len(whole), -1, BLOCK)[blocks[:, 0], blocks[:, 1]]
    whole = whole if rows is None else whole[rows]
    return whole if columns is None else whole[:, columns]


def constant(case: Case) -> Match | None:
    """A matrix, rows or blocks hold one value, which may be zero, where the dense ones differ.

    Statistic: the range of V, 0 for each row. Threshold: 1e-6 of its largest number. Honest storage gives a block
    one value only if all are below half of its step.
    """
    V = case.V.T if case.vector else case.V
    if V.shape[1] < 2 or float(case.W.std()) <= 1e-6 * float(case.W.abs().max()):
        return None
    low, high = V.amin(1), V.amax(1)
    if bool((high - low > 1e-6 * V.abs().amax(1)).any()):
        return None
    if not bool(V.any()):
        return Match("zero", "{is} zero", 1.0)
    same = float(high.max() - low.min()) <= 1e-6 * float(V.abs().max())
    return Match("constant", f"{{holds}} one constant, {float(high[0]):.4g}" if same else "{holds} constants", 1.0)


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
    c = round(c) if abs(c - round(c)) < 5e-3 and round(c) else c
    return case.match("shift", f"{{is}} that of DENSE {'plus' if c > 0 else 'minus'} {abs(c):.3f}", case.W + c)


def scale(case: Case) -> Match | None:
    """All numbers were multiplied by one factor; −1 is an inverted sign.

    Statistic: what cW with c = ⟨V, W⟩ / ‖W‖² leaves of V. Threshold: `Case.fits`, and |c − 1| above 3 %.
    """
    c = float((case.V * case.W).sum(dtype=torch.float64)) / case.size**2
    if abs(c - 1) < 0.03 or not case.fits(case.left(c * case.W), max(1.0, abs(c))):
        return None
    if abs(c + 1) < 0.05:
        return case.match("sign", "{has} the sign of every number inverted", -case.W)
    return case.match("scale", f"{{is}} that of DENSE times {c:.3g}", c * case.W)


def row_scales(case: Case) -> Match | None:
    """Every row was multiplied by a factor of its own, or every column: scales that belong to others, or were lost.

    Statistic: what diag(c)W or W diag(c) with the best factors leaves. Threshold: `Case.fits`, with at least 16
    numbers a factor.
    """
    for axis, what in (1, "row"), (0, "column"):
        if case.W.shape[axis] < 16 or case.vector:
            continue
        c = (case.V * case.W).sum(axis, keepdim=True) / case.W.square().sum(axis, keepdim=True).clamp_min(1e-30)
        if case.fits(case.left(c * case.W), max(1.0, float(c.abs().median()))):
            if bool((c.abs().sub(1).abs() < 0.1).all()):
                return case.match("sign", f"{{has}} the sign of some {what}s inverted", c * case.W)
            return case.match("scale", f"{{has}} each {what} times a factor of its own", c * case.W)
    return None


def transposed(case: Case) -> Match | None:
    """The matrix is stored as its transpose: square, or its numbers read in the other order.

    Statistic: what Wᵀ leaves. Threshold: `Case.fits`.
    """
    if not case.whole or case.vector or min(case.W.shape) < 2:
        return None
    X = case.W.T.reshape(case.W.shape)
    return case.match("transposed", "{is} transposed", X) if case.fits(case.left(X)) else None


def other_tensor(case: Case) -> Match | None:
    """The numbers are those of another tensor of the dense model: another layer, expert, projection or norm.

    Statistic: the least that a tensor of the same shape leaves. Threshold: `Case.fits`. Of a streamed model only the
    tensors of the same layer are tried.
    """
    best: tuple[float, str, int | None, torch.Tensor] | None = None
    own = case.sides.dense_name(case.place)
    whole = tuple(tensor_of(case.sides.dense, own).shape)
    for name in case.sides.alike.get(whole, ()):
        for expert in range(whole[0]) if len(whole) == 3 else (None,):
            if (name, expert) == (own, case.place.expert) or case.sides.away(name):
                continue
            X = case.part(read(case.sides.dense, name, expert))
            left = case.left(X)
            if best is None or left < best[0]:
                best = left, name, expert, X
    if best is None or not case.fits(best[0]):
        return None
    left, name, expert, X = best
    return case.match("other tensor", "{is} that of", X, (name, expert))


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
    W, V = case.whole_pair()
    if axis:
        W, V = W.T, V.T
    if len(W) < 2 or W.shape[1] < 8:
        return None
    numbers = (case.rows, case.columns)[axis]
    some = np.arange(len(W)) if numbers is None else numbers
    some = some[np.unique(np.linspace(0, len(some) - 1, _SAMPLED).astype(int))]
    cut = slice(None, None, max(1, W.shape[1] // _LENGTH))
    w, v = W[:, cut], V[some][:, cut]
    cosines = (v / v.norm(dim=1, keepdim=True).clamp_min(1e-30)) @ (w / w.norm(dim=1, keepdim=True).clamp_min(1e-30)).T
    where = cosines.argmax(1)
    given, wanted = v - w[where], v - w[torch.from_numpy(some)]
    before, after = (
        float(wanted.norm()) / max(float(v.norm()), 1e-30),
        float(given.norm()) / max(float(v.norm()), 1e-30),
    )
    allowed = max(case.found.allowed, 0.2 * before)
    if not (after <= 0.5 * before and after <= allowed and before > 0.3):
        return None
    order = where.numpy()
    moved = order != some
    if not moved.any():
        return None
    return Match("permuted", _order(case, some[moved], order[moved], len(W), what), after)


def _permuted_vector(case: Case) -> Match | None:
    """A vector in another order: each known order is tried, and then any, by the sorted numbers."""
    if not case.whole or len(case.W) < 4 or case.error < 0.02:
        return None
    W, V = case.W[:, 0], case.V[:, 0]
    n = len(W)
    numbers = torch.arange(n)
    orders = [("{is} reversed", numbers.flip(0))]
    spectrum = torch.fft.ifft(torch.fft.fft(V).conj() * torch.fft.fft(W)).real
    k = int(spectrum.argmax())
    orders.append((f"{{is}} shifted by {min(k, n - k)}", (numbers + k) % n))
    if (size := head_size(case)) and n % size == 0:
        for pair in (2, size // 2), (size // 2, 2):
            orders.append((_ROTARY.format("rows"), numbers.view(-1, *pair).transpose(1, 2).reshape(-1)))
    for phrase, order in orders:
        if case.fits(left := case.left(W[order][:, None])):
            return Match("permuted", phrase, left)
    left = float((V.sort().values - W.sort().values).norm()) / case.size
    return Match("permuted", "{has} its numbers in another order", left) if left < min(2e-3, 0.1 * case.error) else None


_ROTARY = "{{has}} {} permuted as by the other rotary layout"


def _order(case: Case, at: np.ndarray, order: np.ndarray, count: int, what: str) -> str:
    """The phrase for rows or columns `at` that are the dense ones `order`."""
    ahead = (order - at) % count
    size = head_size(case)
    if size and count % size == 0 and count > size:
        inside, before = at % size, at - at % size
        halves = before + (inside % 2) * (size // 2) + inside // 2
        pairs = before + (inside % (size // 2)) * 2 + inside // (size // 2)
        if np.mean(halves == order) > 0.95 or np.mean(pairs == order) > 0.95:
            return _ROTARY.format(what)
        if np.mean(order % size == inside) > 0.95 and _blocks_move(at // size, order // size):
            heads = sorted(set((at // size).tolist()))
            named = f"heads {_listed(heads)}" if len(heads) < 9 else "heads"
            return f"{{has}} {named} in another order"
    if len(at) == 2 and set(at) == set(order):
        return f"{{has}} {what} {at.min()} and {at.max()} exchanged"
    if np.mean(ahead == np.bincount(ahead).argmax()) > 0.9:
        by = int(np.bincount(ahead).argmax())
        if 2 * by == count:
            return f"{{has}} the two halves of its {what} exchanged"
        return f"{{has}} its {what} shifted by {by if by <= count // 2 else count - by}"
    if np.mean(order == count - 1 - at) > 0.9:
        return f"{{has}} its {what} in reverse"
    if np.mean(order == (at ^ 1)) > 0.9:
        return f"{{has}} neighbouring {what} exchanged"
    inside, before = at % BLOCK, at - at % BLOCK
    half = BLOCK // 2
    for layout in before + (inside % 2) * half + inside // 2, before + (inside % half) * 2 + inside // half:
        if np.mean(layout == order) > 0.95:
            return f"{{has}} {what} of each block of {BLOCK} in the order of the other packing of 4 bits"
    return f"{{has}} its {what} permuted"


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
    w, v = made
    c = (v * w).sum(-1, keepdim=True) / w.square().sum(-1, keepdim=True).clamp_min(1e-30)
    left = float((v - c * w).norm()) / case.size
    if not case.fits(left, max(1.0, float(c.abs().median()))):
        return None
    size = w.abs().amax(-1)
    neighbour = max(
        (float(torch.corrcoef(torch.stack([(size.roll(k, 1) / size).ravel(), c.ravel()]))[0, 1]) for k in (1, -1)),
        default=0.0,
    )
    by = ", those of the neighbouring block" if neighbour > 0.8 else ""
    return Match("block scale", f"{{has}} blocks of {BLOCK} numbers with wrong scales{by}", left)


def _by_block(case: Case) -> tuple[torch.Tensor, torch.Tensor] | None:
    if case.vector or case.columns is not None or case.W.shape[1] % BLOCK or case.W.shape[1] < 2:
        return None
    w, v = (tensor.reshape(len(tensor), -1, BLOCK) for tensor in (case.W, case.V))
    return w, v


def clipped(case: Case) -> Match | None:
    """Numbers beyond a limit were cut off: blocks that saturate, or a cast that overflows and is clamped.

    Statistic: what W clamped to the range of V leaves. Threshold: `Case.fits`, with 0.1 % of the numbers clamped.
    """
    low, high = float(case.V.min()), float(case.V.max())
    X = case.W.clamp(low, high) if low < high else case.W
    if float((X != case.W).float().mean()) < 1e-3 or not case.fits(case.left(X)):
        return None
    return case.match("saturated", f"{{is}} cut off at {low:.3g} and {high:.3g}", X)


def unsigned(case: Case) -> Match | None:
    """The sign of the numbers was lost, as if signed integers were read without sign.

    Statistic: what |W| leaves. Threshold: `Case.fits`.
    """
    X = case.W.abs()
    return case.match("sign", "{has} lost the signs of its numbers", X) if case.fits(case.left(X)) else None


def _listed(numbers: list[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
