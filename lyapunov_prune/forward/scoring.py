"""Losses of windows from the states that the head reads, without a tokens × vocabulary tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.prefix import restore
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import hooked

# A block of logits this large stays in the cache between the product and the exponentials.
_ROWS, _COLUMNS = 1024, 1024
_ENTRIES = 2**22  # of positions × vocabulary, formed at once where the model's own logits are
_WHOLE = 2**25  # and no more than in a forward of its own
_WIDENED = 2**20  # entries taken to float32 at once, and their exponentials beside them
_TOKENS = 32  # that the head is tried on, fewer where their logits are more than a block
_SAME = 1e-4  # and two units in the last place: of half precision no two kernels need agree to the last bit
# Largest logits of the states that the head is tried on: what a model does to large ones alone, a cap, shows there.
_HEIGHTS = 16.0 ** torch.arange(-1, 6)


class Scorer:
    """Mean loss of every window, `mean_t (log Σ_v exp z_tv − z_t,y)`, and the state that gave it.

    Where the logits are those of the head's matrix, the sum over the vocabulary is taken block by block. It is tried
    once against the model's own, on a few tokens and, as a cap leaves small logits alone, on states scaled to logits
    of 1/16 to 2²⁰ of both signs. Where the model does more to them (a scale, a cap), its own logits are used.
    `enters` says whether these are a function of the final state alone, which `decoder` answers with.
    """

    def __init__(self, decoder: Decoder, ids: torch.Tensor) -> None:
        self.model, self.structure = model, structure = decoder.model, decoder.structure
        self.head: Any = model.get_output_embeddings()
        self.vocabulary = len(self.head.weight)
        self._rows = rows_at_once(self.vocabulary)
        ids = ids[:1, : min(_TOKENS, max(8, self._rows // 4))]
        answers: list[tuple[nn.Module, ModelOutput]] = []

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if isinstance(output, ModelOutput) and isinstance(next(iter(output.values()), None), torch.Tensor):
                answers.append((module, output))

        finals: list[torch.Tensor] = []
        final = (structure.backbone, lambda module, args, kwargs, output: finals.append(output[0]))
        with hooked(after=[*((module, note) for module in model.modules()), final]):
            logits = model(ids, use_cache=False).logits[0]
        state = (finals[0] if finals else final_state(structure, ids))[0]  # a model may go past its backbone (OPT)
        # The model's own forward gives the logits of any state that its decoder is made to answer with, ...
        own = [(module, output) for module, output in answers if _same(output[0][0], [state])]
        self.decoder: Any = own[-1][0] if own else None
        self._answer: Any = own[-1][1] if own else None
        # ... unless it asks another module, or more of the decoder than its state.
        self.enters = bool(own) and self._takes_blocks(state) and _same(self.own(state), logits.split(_COLUMNS, -1))
        self.blockwise = (
            self.enters and state.shape[-1] == self.head.weight.shape[-1] and self._bare_is_own(state, logits)
        )

    def __call__(self, ids: torch.Tensor) -> tuple[list[float], torch.Tensor]:
        """The mean loss of each window, in nats, summed in float64, and the final state (windows × tokens × width)."""
        if self.blockwise:
            state = final_state(self.structure, ids)
            return [self._loss(rows[:-1], targets[1:]) for rows, targets in zip(state, ids, strict=True)], state
        if self.enters and is_large(self.model, ids):
            state = final_state(self.structure, ids)
            return [self.loss(rows, targets) for rows, targets in zip(state, ids, strict=True)], state
        states: list[torch.Tensor] = []
        with hooked(after=[(self.structure.backbone, lambda module, args, kwargs, output: states.append(output[0]))]):
            logits = self.model(ids, use_cache=False).logits
        state = states[0] if states else final_state(self.structure, ids)  # a model may go past its backbone
        return [next_token_loss(rows, targets) for rows, targets in zip(logits, ids, strict=True)], state

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """The model's logits of final states: tokens × width to tokens × vocabulary, in the model's dtype.

        Where the head's matrix does not give them, the model's own forward does, its decoder answering with
        `state` at once. Raises LyapunovPruneError when that forward does not go by its decoder's state alone, or
        gives no finite logits.
        """
        if self.blockwise:
            return self._bare(state)
        self._require_entered()
        return self.own(state)

    def reads_as(self, other: Scorer) -> bool:
        """Whether `other` makes the same logits of every state: those of a head's matrix alone, and the same matrix."""

        def same(key: str) -> bool:
            a, b = (getattr(scorer.head, key, None) for scorer in (self, other))
            if a is None or b is None:
                return a is b
            return (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)

        return self.blockwise and other.blockwise and same("weight") and same("bias")

    def tiles(self, state: torch.Tensor, columns: int) -> Iterator[torch.Tensor]:
        """`logits` of a final state (tokens × width), so many columns of the vocabulary at a time.

        Where the head's matrix gives them, no more than those are formed at once.
        """
        return self._bare_tiles(state, columns) if self.blockwise else iter(self.logits(state).split(columns, -1))

    def blocks(self, state: torch.Tensor) -> Iterator[torch.Tensor]:
        """`logits` of a final state (tokens × width), the model's own, a block of positions at a time."""
        self._require_entered()
        yield from (self.own(rows) for (rows,) in self.split(state))

    def split(self, *of: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Of tensors with a row a position, those whose logits are formed at once, one block after the other."""
        return zip(*(each.split(self._rows) for each in of), strict=True)

    def loss(self, state: torch.Tensor, ids: torch.Tensor) -> float:
        """`next_token_loss` of one window from its final state (tokens × width), by `blocks`.

        Raises LyapunovPruneError as `logits`.
        """
        return float(mean_over(self.blocks(state[:-1]), ids[1:], loss_sum))

    def _require_entered(self) -> None:
        if not self.enters:
            raise LyapunovPruneError(
                f"the logits of {type(self.model).__name__} are not finite, or no function of its final state alone; "
                "load it in a wider dtype, or give another decoder"
            )

    def _takes_blocks(self, state: torch.Tensor) -> bool:
        """Whether the model's forward takes fewer positions than its text has (ProphetNet reshapes by that)."""
        try:
            self.own(state[:1])
        except RuntimeError:
            return False
        return True

    def _loss(self, state: torch.Tensor, targets: torch.Tensor) -> float:
        device = self.head.weight.device
        blocks = zip(state.to(device).split(_ROWS), targets.to(device).split(_ROWS), strict=True)
        return sum(float(lift(self._losses(rows, wanted)).sum()) for rows, wanted in blocks) / len(targets)

    def _losses(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """`log Σ_v exp z_v − z_y` of every row, float32, `z_y` rounded as all logits are."""
        own, total = torch.zeros(2, len(rows), 1, device=rows.device)
        shift = total
        for number, tile in enumerate(self.tiles(rows, _COLUMNS)):
            z = tile.float()
            at = targets.unsqueeze(-1) - number * _COLUMNS
            column = at.clamp(0, z.shape[-1] - 1)
            own = torch.where(at == column, z.gather(-1, column), own)
            if number == 0:  # its largest serves all: a maximum of each would be another pass over the vocabulary
                shift = z.amax(-1, keepdim=True)
            total += z.sub_(shift).exp_().sum(-1, keepdim=True)
        if total.isfinite().all():
            return (total.log() + (shift - own)).squeeze(-1)
        # A later tile towers over the first by more than exp can hold.
        return torch.stack([z.float().logsumexp(-1) for z in self.tiles(rows, _COLUMNS)]).logsumexp(0) - own.squeeze(-1)

    def _bare_is_own(self, state: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether the head's matrix gives the model's own logits, those of `state` and far larger and smaller ones.

        What half precision, which ends at 65,504, cannot hold is not asked.
        """
        sizes = _largest(logits.float())
        row = state[sizes.argmax().to(state.device)].float()
        scales = torch.cat([_HEIGHTS, -_HEIGHTS]).to(state.device) / sizes.max().to(state.device)
        scaled = (scales.unsqueeze(-1) * row).to(state.dtype)
        rows, own = torch.cat([state, scaled]), torch.cat([logits, *(self.own(some) for (some,) in self.split(scaled))])
        away, size = _away(own, self._bare_tiles(rows, _COLUMNS))  # the head is read once for all
        held = size.isfinite() & (_largest(own) != torch.inf) & rows.isfinite().all(-1).to(size.device)
        return bool((away <= _rounding(own) * size)[held].all())

    def _bare(self, state: torch.Tensor) -> torch.Tensor:
        return linear(state.to(self.head.weight.device), self.head.weight, self.head.bias)

    def _bare_tiles(self, state: torch.Tensor, columns: int) -> Iterator[torch.Tensor]:
        """`_bare`, so many columns at a time."""
        W, bias = self.head.weight, self.head.bias
        state = state.to(W.device)
        for start in range(0, len(W), columns):
            part = slice(start, start + columns)
            yield linear(state, W[part], None if bias is None else bias[part])

    def own(self, state: torch.Tensor) -> torch.Tensor:
        """What the model's own forward makes of `state` (tokens × width) as its decoder's answer; if it `enters`."""
        decoder = self.decoder
        before = decoder.__dict__.get("forward")
        answer = type(self._answer)(**{**self._answer, next(iter(self._answer)): state[None]})
        ids = torch.zeros(1, len(state), dtype=torch.int64, device=next(decoder.parameters()).device)
        decoder.forward = lambda *args, **kwargs: answer
        try:
            return self.model(ids, use_cache=False).logits[0]
        finally:
            restore(decoder, before)


def rows_at_once(vocabulary: int) -> int:
    """Positions whose logits, the model's own, are formed at once."""
    return max(1, _ENTRIES // vocabulary)


def is_large(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Whether the logits of these windows are more than are formed in one forward."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return weight is not None and ids.numel() * len(weight) > _WHOLE


def _same(rows: torch.Tensor, tiles: Iterable[torch.Tensor]) -> bool:
    """Whether every row (of logits, or a state) is that of the tiles side by side, up to rounding."""
    away, size = _away(rows, tiles)
    return bool((away <= _rounding(rows) * size).all())


def _rounding(rows: torch.Tensor) -> float:
    """How far entries of the same row may be apart, over its largest, that two kernels computed in its dtype."""
    return max(_SAME, 2 * torch.finfo(rows.dtype).eps)


def _away(logits: torch.Tensor, tiles: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """How far every row of the logits is from that of the tiles side by side at most, and the largest of these.

    Infinitely far where they are of other shapes.
    """
    away = size = torch.zeros(len(logits), device=logits.device)
    start = 0
    for tile in tiles:
        given, wanted = logits[:, start : start + tile.shape[-1]].float(), tile.to(logits.device).float()
        if given.shape != wanted.shape:
            return torch.full_like(size, torch.inf), size
        away, size = torch.maximum(away, _largest(given - wanted)), torch.maximum(size, _largest(wanted))
        start += tile.shape[-1]
    return away if start == logits.shape[-1] else torch.full_like(size, torch.inf), size


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of every row, without a copy of it."""
    low, high = rows.aminmax(dim=-1)
    return torch.maximum(high, -low)


_CHUNK = 512  # tokens whose logits are widened at a time


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Mean loss in nats of one window: `logits` tokens × vocabulary, `ids` its tokens, the first unscored.

    Logits are widened to float32 a chunk of tokens at a time, losses summed in float64.
    """
    return float(mean_over(scored_in(logits), ids[1:], loss_sum))


def scored_in(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The logits of a window (tokens × vocabulary) that are scored, all but the last, one chunk after the other."""
    return logits[:-1].split(_CHUNK)


def loss_sum(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """`Σ_t (log Σ_v exp z_tv − z_t,y)`, `logits` tokens × vocabulary in float32, `wanted` tokens; summed in float64."""
    rows = max(1, _WIDENED // logits.shape[-1])
    parts = zip(logits.split(rows), wanted.split(rows), strict=True)
    losses = [F.cross_entropy(z.float(), y, reduction="none") for z, y in parts]
    return lift(torch.cat(losses)).sum().cpu()


# Of logits (tokens × vocabulary) and the tokens that come next, what is summed over the tokens.
Sum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mean_over(blocks: Iterable[torch.Tensor], wanted: torch.Tensor, total: Sum) -> torch.Tensor:
    """The mean over the `wanted` tokens of what `total` sums of the logits of one block of them after the other."""
    sums, start = list[torch.Tensor](), 0
    for logits in blocks:
        sums.append(total(logits, wanted[start : start + len(logits)].to(logits.device)))
        start += len(logits)
        del logits  # else it would be there still while the next are made
    return torch.stack(sums).sum(0) / len(wanted)
