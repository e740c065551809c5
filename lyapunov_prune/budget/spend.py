"""From a model to a GGUF file or a folder of packed integers, of a size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.allocation.knapsack import cheapest
from lyapunov_prune.arguments import Seed
from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.cost import TensorCost, costs
from lyapunov_prune.budget.feedback import fed_forward, written_by_itself
from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.budget.measured import corrected
from lyapunov_prune.budget.schemes import Schemes
from lyapunov_prune.budget.size import bytes_for
from lyapunov_prune.budget.spent import Frontier, Spent
from lyapunov_prune.budget.storage import Chosen, RoundedModel, Storage
from lyapunov_prune.data.batch import TokenBatch, require_disjoint
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.evaluation.judging import compare, require_windows
from lyapunov_prune.evaluation.perplexity import ratio_of
from lyapunov_prune.evaluation.sizes import SizesTried
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.models.decoder import Decoder, runs_model
from lyapunov_prune.models.device import free_memory
from lyapunov_prune.models.ggml import WIDE
from lyapunov_prune.models.gguf import SUFFIX, gguf_file
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.how import How
from lyapunov_prune.models.launched import from_each
from lyapunov_prune.models.plain import PlainStreamable
from lyapunov_prune.predictions.divergence import kl_by_window
from lyapunov_prune.progress import is_main, track, warn
from lyapunov_prune.results.files import require_disk, require_empty
from lyapunov_prune.results.worth import Ratio, Worth

_OFF = 0.15  # a prediction that differs by a larger share from what is measured is not right
_TRIED = (8.5, 6.5, 5.5, 4.5, 4.0, 3.5, 3.0)  # bits a weight, where no size is asked for


@runs_model
def spend(
    model: PlainStreamable,
    tokenizer: PreTrainedTokenizerBase | None,
    size: str | None,
    output: str | Path,
    *,
    batch: Readable,
    judge: TokenBatch,
    check: TokenBatch,
    seed: Seed = 0,
) -> Spent:
    """Write `model` to `output`, in at most `size` (`300MB`, `50%` or `4.5bpw`), as good as that allows.

    In a `.gguf` file every matrix, embedding and head among them, gets a block type (`blocks.Blocks`); in a folder a
    matrix of the layers gets packed integers, or 16 bits (`schemes.Schemes`). The types are those with the least sum of
    costs (`cost.costs`, measured on `batch`) within the bytes (`allocation.knapsack`). Experts that one tensor holds
    get one type together, and in a folder so do matrices of one input. The KL is measured on `judge`.

    `check` decides, and is with `batch` what the file's history names as seen. Without a size the file is the smallest
    of `_TRIED` that costs less than 10 % more perplexity there (`sizes.SizesTried`). If the prediction differs from the
    KL there by more than 15 %, and by more than chance explains, the costs of the worst matrices are measured one at a
    time on `batch` (`measured.corrected`), the types are chosen again, and those of the smaller KL there stay. Then the
    model is written with feedback too (`feedback.fed_forward`), and what has the smaller KL there stays. The header's
    description, or the card, says the ratio of perplexities on `judge`.

    A streamed model is written with one layer in memory, without feedback and with the costs as they are.
    The states of `batch` before every layer, if memory is short, and the rounded tensors lie beside `output` meanwhile.

    Raises CheckFailed if every one of `_TRIED` costs more, and LyapunovPruneError for a size below the least, which is
    named, and above 16 bits, for a disk that does not hold it, for fewer than 4 windows that judge or decide, for texts
    that share tokens, for an `output` that exists, and as `write_gguf` and `Schemes`; then nothing is written.
    """
    storage: Storage = BLOCKS if require_target(output) else Schemes(model)
    cost_of = partial(costs, storage=storage, seed=seed, folder=Path(output).parent)
    reading = read(model, batch)
    for one, other in combinations((reading.batch, require_windows(judge), require_windows(check)), 2):
        require_disjoint(one, other)
    weights = sum(p.numel() for p in matrices_of(model.model).values())
    judged, decides = read(model, judge), read(model, check)
    write = partial(_made, storage, tokenizer, output, decides)
    make = partial(_cheapest, write)
    tried = None
    if size is None:
        found = list(cost_of(reading, bits=_TRIED[-1]))
        tried = _tried(make, decides, found, weights)
        if tried.taken is None:
            raise CheckFailed(f"{tried.answer()[0].rstrip('.')} ({tried.least()}); give --size to take one anyway")
        size = tried.names[tried.taken]
        room = room_for(storage, model, tokenizer, size)
    else:
        room = room_for(storage, model, tokenizer, size)
        copies = 1 + (storage is BLOCKS and model.stream is not None)
        require_disk(Path(output).parent, copies * room, "the rounded tensors, and what they are written to,")
        found = list(cost_of(reading, bits=8 * room / weights))
    made = make(found, room)
    alone: list[str] = []
    as_they_are = made.is_off and model.stream is not None  # each of them would take a forward through the files
    if made.is_off and not as_they_are:
        measured, alone = corrected(reading, made.rounded.decoder, made.found, made.pick)
        if not np.array_equal(chosen_types(measured, room), made.pick):
            made = min(made, make(measured, room), key=lambda each: each.kl.mean())
    fed = None
    if model.stream is None:
        made, fed = _fed(write, storage, reading, made, seed)
    kl, loss = kl_by_window(judged, read(made.rounded.decoder, judge))
    saw = reading.measured_on(seed), decides.measured_on()
    worth = Worth(None, ratio_of(loss), f"{judge.text} ({judge.split})", judge.tokens)
    written = made.rounded.write(saw, worth) if is_main() else 0
    return Spent(
        wanted=size,
        names=tuple(t.name for t in made.found),
        types=tuple(t.kinds[k].name for t, k in zip(made.found, made.pick, strict=True)),
        bytes=made.bytes,
        cost=made.costs,
        bits=8 * float(made.bytes.sum()) / weights,
        size=from_each(model.model, written)[0],
        kl=kl,
        loss=loss,
        alone=tuple(alone),
        fed=fed,
        frontier=frontier(storage, made.found, 8 * room / weights, weights),
        measured_on=saw[0],
        judged_on=judged.measured_on(),
        rounded_before=was_rounded(model),
        tried=tried,
        as_they_are=as_they_are,
    )


def require_target(output: str | Path) -> bool:
    """Whether `output` is a GGUF file; raises LyapunovPruneError unless it, or a folder, can be written there."""
    is_file = Path(output).suffix == SUFFIX
    require_empty(output, folder=not is_file)
    return is_file


@dataclass(frozen=True, eq=False)
class _Made:
    """A model with the types `pick` of the matrices `found`, rounded as `chosen`, and what it loses.

    `kl` and `loss` (windows,) are those of `kl_by_window`.
    """

    found: list[TensorCost]
    pick: np.ndarray
    chosen: Chosen
    rounded: RoundedModel
    kl: np.ndarray
    loss: np.ndarray

    @property
    def bytes(self) -> np.ndarray:
        return np.array([t.bytes[k] for t, k in zip(self.found, self.pick, strict=True)], np.float64)

    @property
    def costs(self) -> np.ndarray:
        return np.array([t.cost[k] for t, k in zip(self.found, self.pick, strict=True)])

    @property
    def is_off(self) -> bool:
        """Whether the KL differs from what was predicted by more than `_OFF`, and than chance explains."""
        told, predicted = compare(np.zeros_like(self.kl), self.kl), self.costs.sum()
        return bool(abs(told.change - predicted) > _OFF * predicted and not told.low <= predicted <= told.high)


def _made(
    storage: Storage,
    tokenizer: PreTrainedTokenizerBase | None,
    output: str | Path,
    judged: Reading,
    found: list[TensorCost],
    pick: np.ndarray,
    chosen: Chosen,
) -> _Made:
    rounded = storage.made(judged.decoder, tokenizer, output, chosen)
    return _Made(found, pick, chosen, rounded, *kl_by_window(judged, read(rounded.decoder, judged.batch)))


def _cheapest(write: Callable[..., _Made], found: list[TensorCost], room: int) -> _Made:
    """The model with the types of least cost within `room` bytes."""
    pick = chosen_types(found, room)
    return write(found, pick, {t.name: How(t.kinds[k], t.importance) for t, k in zip(found, pick, strict=True)})


def _fed(
    write: Callable[..., _Made], storage: Storage, reading: Reading, made: _Made, seed: int
) -> tuple[_Made, float | None]:
    """`made`, or the same types with feedback if its KL is smaller, and the KL with feedback over that without."""
    before = float(made.kl.mean())
    try:
        _require_third(reading.model, int(made.bytes.sum()))
        own = written_by_itself(reading, seed)
        chosen = fed_forward(own, storage, made.chosen, copy.deepcopy(made.rounded.decoder.model))
    except LyapunovPruneError as why:
        warn(f"written without feedback: {why}")
        return made, None
    if before == 0 or all(how.stored is None for how in chosen.values()):
        return made, None
    fed = write(made.found, made.pick, chosen)
    return min(made, fed, key=lambda each: each.kl.mean()), float(fed.kl.mean()) / before


def _require_third(model: PreTrainedModel, size: int) -> None:
    """Raise LyapunovPruneError unless memory holds a third model beside two, and `size` bytes of matrices."""
    needed = size + sum(p.nbytes for p in model.parameters() if p.device == model.device)
    free = min(from_each(model, free_memory(str(model.device))))  # every process decides alike
    if needed > free:
        raise LyapunovPruneError(f"a third model in memory needs {needed:,} bytes, and {free:,} are free")


def _tried(
    make: Callable[[list[TensorCost], int], _Made], dense: Reading, found: list[TensorCost], weights: int
) -> SizesTried:
    """The perplexity of the best types of every size of `_TRIED`, down to the first that costs too much."""
    rows: list[tuple[str, int, Ratio]] = []
    least = sum(int(t.bytes.min()) for t in found)
    for bits in track(_TRIED, "sizes"):
        room = int(bits * weights / 8)
        if rows and room < least:  # narrower than any types that these rows can take
            break
        made = make(found, room)
        rows.append((f"{bits:g}bpw", int(made.bytes.sum()), ratio_of(made.loss)))
        if not rows[-1][2].is_good:
            break
    return SizesTried.of(rows, dense.measured_on())


def was_rounded(decoder: Decoder) -> bool:
    """Whether the model was read from a GGUF file with matrices of few bits."""
    file = gguf_file(str(decoder.model.config._name_or_path))
    return file is not None and any(t.kind not in WIDE for t in read_header(file).tensors)


def least_of(storage: Storage, matrices: Mapping[str, nn.Parameter]) -> int:
    """The bytes of all matrices in the narrowest types."""
    kinds = {name: storage.kinds_for(name, p.shape[-1]) for name, p in matrices.items()}
    return sum(min(storage.size_in(kind, p.shape) for kind in kinds[name]) for name, p in matrices.items())


def room_for(storage: Storage, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None, size: str) -> int:
    """The bytes of matrices that `size` allows. Raises LyapunovPruneError for less than the narrowest types take."""
    head, matrices = storage.head(decoder, tokenizer), matrices_of(decoder.model)
    weights = sum(p.numel() for p in matrices.values())
    room, least = bytes_for(size, weights, head), least_of(storage, matrices)
    if room < least:
        raise LyapunovPruneError(
            f"{size} is too small: the narrowest types take {(least + head) / 1e6:.4g} MB, {8 * least / weights:.3g} "
            "bits a weight; give more, or remove layers first (prune)"
        )
    return room


def chosen_types(found: Sequence[TensorCost], room: int) -> np.ndarray:
    """The index of each matrix's type: the least total cost within `room` bytes."""
    named = [t.together or t.name for t in found]
    shares, most = list(dict.fromkeys(named)), max(len(t.kinds) for t in found)
    rows = [shares.index(name) for name in named]
    cost, size = np.full((len(shares), most), np.inf), np.zeros((len(shares), most))
    for row, t in zip(rows, found, strict=True):
        own = slice(len(t.kinds))
        cost[row, own] = np.where(np.isinf(cost[row, own]), 0, cost[row, own]) + t.cost
        size[row, own] += t.bytes
    return cheapest(cost, size, room)[rows]


def frontier(storage: Storage, found: Sequence[TensorCost], bits: float, weights: int) -> Frontier:
    """What the sizes of one type for all are predicted to cost, and the best types of these sizes."""
    rows = []
    for kind in storage.alike(bits):
        alike = [_nearest(storage, kind, t.kinds) for t in found]
        size = sum(int(t.bytes[k]) for t, k in zip(found, alike, strict=True))
        best = chosen_types(found, size)
        costs = [sum(float(t.cost[k]) for t, k in zip(found, pick, strict=True)) for pick in (alike, best)]
        rows.append((kind.name, size, *costs))
    names, sizes, one, chosen = zip(*rows, strict=True)
    taken = np.array(sizes, np.float64)
    return Frontier(names, taken, 8 * taken / weights, np.array(one), np.array(chosen))


def _nearest(storage: Storage, kind: Any, kinds: Sequence[Any]) -> int:
    """The index of `kind`, or else of the narrowest type that is no narrower."""
    own = storage.bits_of(kind)
    wide = [bits if (bits := storage.bits_of(each)) >= own else np.inf for each in kinds]
    return kinds.index(kind) if kind in kinds else int(np.argmin(wide))
