"""From a model to a GGUF file of a size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from lyapunov_prune.allocation.knapsack import cheapest
from lyapunov_prune.arguments import Seed
from lyapunov_prune.budget.cost import TensorCost, by_expert, costs, in_parts, kinds_for, size_in
from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.budget.measured import corrected
from lyapunov_prune.budget.size import bytes_for
from lyapunov_prune.budget.spent import Frontier, Spent
from lyapunov_prune.data.batch import TokenBatch, require_disjoint
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.evaluation.judging import compare, require_windows
from lyapunov_prune.evaluation.perplexity import ratio_of
from lyapunov_prune.evaluation.sizes import SizesTried
from lyapunov_prune.export.gguf import require_file
from lyapunov_prune.export.gguf_whole import header_values, rounded_pieces, write_rounded
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.models.decoder import Decoder, runs_model
from lyapunov_prune.models.ggml import WIDE, Kind, bits_of, dequantised, quantised
from lyapunov_prune.models.gguf import DESCRIPTION_KEY, gguf_file
from lyapunov_prune.models.gguf_copy import Piece
from lyapunov_prune.models.gguf_header import read_header, text
from lyapunov_prune.models.gguf_tensors import BlockType
from lyapunov_prune.models.launched import from_each
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.predictions.divergence import kl_by_window
from lyapunov_prune.progress import is_main, track
from lyapunov_prune.results.worth import Ratio

# One type for all, as the sizes that are shown beside the one that was asked for.
_SIZES = (Kind.Q2_K, Kind.Q3_K, Kind.IQ4_XS, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0)
_OFF = 0.15  # a prediction that differs by a larger share from what is measured is not right
_NEAR = 0.75  # the narrowest of them, as a share of the bits that were asked for
_TRIED = (8.5, 6.5, 5.5, 4.5, 4.0, 3.5, 3.0)  # bits a weight, where no size is asked for
_PLACE = 160  # bytes in a header for a tensor's name and place, and the space up to the next one, at most


@runs_model
def spend(
    model: Plain,
    tokenizer: PreTrainedTokenizerBase | None,
    size: str | None,
    output: str | Path,
    *,
    batch: Readable,
    judge: TokenBatch,
    check: TokenBatch,
    seed: Seed = 0,
) -> Spent:
    """Write `model` to the GGUF file `output` of at most `size` (`300MB`, `50%` or `4.5bpw`), as good as that allows.

    Every matrix, embedding and head among them, gets one block type: those with the least sum of costs (`cost.costs`,
    measured on `batch`) within the bytes (`allocation.knapsack`). Experts that one tensor holds get one type together.
    Vectors and routers stay float32. The KL is measured on `judge`.

    `check` decides, and is with `batch` what the file's history names as seen. Without a size the file is the smallest
    of `_TRIED` that costs less than 10 % more perplexity there (`sizes.SizesTried`). If the prediction differs from the
    KL there by more than 15 %, and by more than chance explains, the costs of the worst matrices are measured one at a
    time on `batch` (`measured.corrected`), the types are chosen again, and those of the smaller KL there stay. The
    header's description says the ratio of perplexities on `judge`.

    Raises CheckFailed if every one of `_TRIED` costs more, and LyapunovPruneError for a size below the least, which is
    named, and above 16 bits, for fewer than 4 windows that judge or decide, for texts that share tokens, for an
    `output` that exists, and as `write_gguf`; then nothing is written.
    """
    require_file(output)
    reading = read(model, batch)
    for one, other in combinations((reading.batch, require_windows(judge), require_windows(check)), 2):
        require_disjoint(one, other)
    weights = sum(p.numel() for p in matrices_of(model.model).values())
    judged, decides = read(model, judge), read(model, check)
    tried = None
    if size is None:
        found = list(costs(reading, bits=_TRIED[-1], seed=seed))
        tried = _tried(decides, found, weights)
        if tried.taken is None:
            raise CheckFailed(f"{tried.answer()[0].rstrip('.')} ({tried.least()}); give --size to take one anyway")
        size = tried.names[tried.taken]
        room = room_for(model, tokenizer, size)
    else:
        room = room_for(model, tokenizer, size)
        found = list(costs(reading, bits=8 * room / weights, seed=seed))
    made = _made(decides, found, room)
    alone: list[str] = []
    if made.is_off:
        measured, alone = corrected(reading, made.pieces[0], made.found, made.pick)
        if not np.array_equal(chosen_types(measured, room), made.pick):
            made = min(made, _made(decides, measured, room), key=lambda each: each.kl.mean())
    kl, loss = kl_by_window(judged, read(made.pieces[0], judge))
    saw = reading.measured_on(seed), decides.measured_on()
    values = header_values(model, tokenizer, made.commonest, "shrink", *saw)
    values[DESCRIPTION_KEY] = text(ratio_of(loss).on(judge.text, judge.tokens))
    written = write_rounded(model, tokenizer, output, values, *made.pieces).size if is_main() else 0
    return Spent(
        wanted=size,
        names=tuple(t.name for t in made.found),
        types=made.types,
        bytes=made.bytes,
        cost=made.costs,
        bits=8 * float(made.bytes.sum()) / weights,
        size=from_each(model.model, written)[0],
        kl=kl,
        loss=loss,
        alone=tuple(alone),
        frontier=frontier(made.found, 8 * room / weights, weights),
        measured_on=saw[0],
        judged_on=judged.measured_on(),
        rounded_before=was_rounded(model),
        tried=tried,
    )


@dataclass(frozen=True, eq=False)
class _Made:
    """A model with the types `pick` of the matrices `found`, as `rounded_pieces` makes it, and what it loses.

    `kl` and `loss` (windows,) are those of `kl_by_window`.
    """

    found: list[TensorCost]
    pick: np.ndarray
    pieces: tuple[Decoder, list[Piece], float]
    kl: np.ndarray
    loss: np.ndarray

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(t.kinds[k].name for t, k in zip(self.found, self.pick, strict=True))

    @property
    def bytes(self) -> np.ndarray:
        return np.array([t.bytes[k] for t, k in zip(self.found, self.pick, strict=True)], np.float64)

    @property
    def costs(self) -> np.ndarray:
        return np.array([t.cost[k] for t, k in zip(self.found, self.pick, strict=True)])

    @property
    def commonest(self) -> str:
        """The type of the most bytes."""
        return max(set(self.types), key=lambda kind: self.bytes[np.array(self.types) == kind].sum())

    @property
    def is_off(self) -> bool:
        """Whether the KL differs from what was predicted by more than `_OFF`, and than chance explains."""
        told, predicted = compare(np.zeros_like(self.kl), self.kl), self.costs.sum()
        return bool(abs(told.change - predicted) > _OFF * predicted and not told.low <= predicted <= told.high)


def _made(judged: Reading, found: list[TensorCost], room: int) -> _Made:
    """The model with the types of least cost within `room` bytes."""
    pick = chosen_types(found, room)
    chosen = {t.name: BlockType(t.kinds[k], t.importance) for t, k in zip(found, pick, strict=True)}
    pieces = rounded_pieces(judged.decoder, "f16", chosen)
    return _Made(found, pick, pieces, *kl_by_window(judged, read(pieces[0], judged.batch)))


def _tried(dense: Reading, found: list[TensorCost], weights: int) -> SizesTried:
    """The perplexity of the best types of every size of `_TRIED`, down to the first that costs too much."""
    rows: list[tuple[str, int, Ratio]] = []
    least = sum(int(t.bytes.min()) for t in found)
    for bits in track(_TRIED, "sizes"):
        room = int(bits * weights / 8)
        if rows and room < least:  # narrower than any types that these rows can take
            break
        made = _made(dense, found, room)
        rows.append((f"{bits:g}bpw", int(made.bytes.sum()), ratio_of(made.loss)))
        if not rows[-1][2].is_good:
            break
    return SizesTried.of(rows, dense.measured_on())


def was_rounded(decoder: Decoder) -> bool:
    """Whether the model was read from a GGUF file with matrices of few bits."""
    file = gguf_file(str(decoder.model.config._name_or_path))
    return file is not None and any(t.kind not in WIDE for t in read_header(file).tensors)


def room_for(decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None, size: str) -> int:
    """The bytes of matrices that `size` allows. Raises LyapunovPruneError for less than the narrowest types take."""
    header = header_values(decoder, tokenizer, "f16")
    tensors = list(decoder.model.parameters())
    head = sum(len(key) + 16 + len(value.raw) for key, value in header.items()) + _PLACE * len(tensors)
    matrices = matrices_of(decoder.model)
    weights = sum(p.numel() for p in matrices.values())
    head += 4 * (sum(p.numel() for p in tensors) - weights)
    room = bytes_for(size, weights, head)
    least = sum(size_in(kinds_for(p.shape[-1])[0], p.numel()) for p in matrices.values())
    if room < least:
        raise LyapunovPruneError(
            f"{size} is too small: the narrowest types take {(least + head) / 1e6:.4g} MB, {8 * least / weights:.3g} "
            "bits a weight; give more, or remove layers first (prune)"
        )
    return room


def chosen_types(found: Sequence[TensorCost], room: int) -> np.ndarray:
    """The index of each matrix's type: the least total cost within `room` bytes."""
    most = max(len(t.kinds) for t in found)
    cost, size = np.full((len(found), most), np.inf), np.zeros((len(found), most))
    for row, t in enumerate(found):
        cost[row, : len(t.kinds)], size[row, : len(t.kinds)] = t.cost, t.bytes
    return cheapest(cost, size, room)


def frontier(found: Sequence[TensorCost], bits: float, weights: int) -> Frontier:
    """What the sizes of one type for all are predicted to cost, and the best types of these sizes.

    Types far narrower than `bits` a weight are left out, since the costs leave some of them out.
    """
    rows = []
    for kind in _SIZES:
        if bits_of(kind) < _NEAR * bits:
            continue
        alike = [_nearest(kind, t.kinds) for t in found]
        size = sum(int(t.bytes[k]) for t, k in zip(found, alike, strict=True))
        best = chosen_types(found, size)
        costs = [sum(float(t.cost[k]) for t, k in zip(found, pick, strict=True)) for pick in (alike, best)]
        rows.append((kind.name, size, *costs))
    names, sizes, one, chosen = zip(*rows, strict=True)
    taken = np.array(sizes, np.float64)
    return Frontier(names, taken, 8 * taken / weights, np.array(one), np.array(chosen))


def _nearest(kind: Kind, kinds: Sequence[Kind]) -> int:
    """The index of `kind`, or else of the narrowest type that is no narrower."""
    wide = [bits_of(each) if bits_of(each) >= bits_of(kind) else np.inf for each in kinds]
    return kinds.index(kind) if kind in kinds else int(np.argmin(wide))


def rounded(W: np.ndarray, how: BlockType) -> np.ndarray:
    """`W` ((experts ×) rows × columns) as it is read back from the blocks of `how`."""
    assert how.importance is not None
    each = zip(by_expert(W), np.atleast_2d(how.importance), strict=True)
    return np.concatenate([_rounded(w, how.type, importance) for w, importance in each]).reshape(W.shape)


def _rounded(W: np.ndarray, kind: Kind, importance: np.ndarray) -> np.ndarray:
    return np.concatenate(in_parts(W, lambda rows: dequantised(quantised(W[rows], kind, importance), kind)))
