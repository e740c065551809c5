"""From a model to a GGUF file of a size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lyapunov_prune.allocation.knapsack import cheapest
from lyapunov_prune.arguments import Seed
from lyapunov_prune.budget.cost import TensorCost, by_expert, costs, in_parts, kinds_for, size_in
from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.budget.size import bytes_for
from lyapunov_prune.budget.spent import Frontier, Spent
from lyapunov_prune.data.batch import TokenBatch, require_disjoint
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import require_windows
from lyapunov_prune.export.gguf import require_file
from lyapunov_prune.export.gguf_whole import header_values, rounded_pieces, write_rounded
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Decoder, runs_model
from lyapunov_prune.models.ggml import WIDE, Kind, bits_of, dequantised, quantised
from lyapunov_prune.models.gguf import gguf_file
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.gguf_tensors import BlockType
from lyapunov_prune.models.launched import from_each
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.predictions.spaces import divergences
from lyapunov_prune.progress import is_main

# One type for all, as the sizes that are shown beside the one that was asked for.
_SIZES = (Kind.Q2_K, Kind.Q3_K, Kind.IQ4_XS, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0)
_NEAR = 0.75  # the narrowest of them, as a share of the bits that were asked for
_PLACE = 160  # bytes in a header for a tensor's name and place, and the space up to the next one, at most


@runs_model
def spend(
    model: Plain,
    tokenizer: PreTrainedTokenizerBase | None,
    size: str,
    output: str | Path,
    *,
    batch: Readable,
    judge: TokenBatch,
    seed: Seed = 0,
) -> Spent:
    """Write `model` to the GGUF file `output` of at most `size` (`300MB`, `50%` or `4.5bpw`), as good as that allows.

    Every matrix, embedding and head among them, gets one block type: those with the least sum of costs (`cost.costs`,
    measured on `batch`) within the bytes (`allocation.knapsack`). Experts that one tensor holds get one type together.
    Vectors and routers stay float32. The KL is measured on `judge`.

    Raises LyapunovPruneError for a size below the least, which is named, and above 16 bits, for fewer than 4 windows
    that judge, for texts that share tokens, for an `output` that exists, and as `write_gguf`; then nothing is written.
    """
    require_file(output)
    reading = read(model, batch)
    require_disjoint(reading.batch, require_windows(judge))
    room = room_for(model, tokenizer, size)
    weights = sum(p.numel() for p in matrices_of(model.model).values())
    found = list(costs(reading, bits=8 * room / weights, seed=seed))
    pick = chosen_types(found, room)
    chosen = {t.name: BlockType(t.kinds[k], t.importance) for t, k in zip(found, pick, strict=True)}
    sizes = Counter[str]()
    for t, k in zip(found, pick, strict=True):
        sizes[t.kinds[k].name] += int(t.bytes[k])
    values = header_values(model, tokenizer, sizes.most_common(1)[0][0])
    made = rounded_pieces(model, "f16", chosen)
    judged = read(model, judge)
    kl, loss = kl_by_window(judged, read(made[0], judge))
    written = write_rounded(model, tokenizer, output, values, *made).size if is_main() else 0
    taken = np.array([t.bytes[k] for t, k in zip(found, pick, strict=True)])
    return Spent(
        wanted=size,
        names=tuple(chosen),
        types=tuple(each.type.name for each in chosen.values()),
        bytes=taken.astype(np.float64),
        cost=np.array([t.cost[k] for t, k in zip(found, pick, strict=True)]),
        bits=8 * float(taken.sum()) / weights,
        size=from_each(model.model, written)[0],
        kl=kl,
        loss=loss,
        frontier=frontier(found, 8 * room / weights, weights),
        measured_on=reading.measured_on(seed),
        judged_on=judged.measured_on(),
        rounded_before=was_rounded(model),
    )


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
            f"{size} is less than the narrowest types take: {(least + head) / 1e6:.4g} MB, {8 * least / weights:.3g} "
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


def kl_by_window(dense: Reading, changed: Reading) -> tuple[np.ndarray, np.ndarray]:
    """KL(dense ‖ changed) of every window, and by how much its loss rises: (windows,) float64.

    Both are in nats a token, over all positions but the last.
    """

    @torch.no_grad()
    def means(first: int, ids: torch.Tensor) -> torch.Tensor:
        sums, wanted = torch.zeros(2, dtype=torch.float64), ids[0, 1:].cpu()
        start = 0
        for pair in zip(dense.logits(ids)[0], changed.logits(ids)[0], strict=True):
            log_p, log_q = (lift(logits).log_softmax(-1) for logits in pair)
            next_ids = wanted[start : start + len(log_p), None].to(log_p.device)
            rise = (log_p.gather(1, next_ids) - log_q.gather(1, next_ids)).sum()
            sums += torch.stack([divergences(log_p, log_q)[1].sum(), rise]).cpu()
            start += len(log_p)
        return sums / len(wanted)

    kl, loss = torch.stack(dealt(dense, 1, means, "divergence")).T.numpy()
    return kl, loss
