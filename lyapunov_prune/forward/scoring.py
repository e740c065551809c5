"""Losses of windows from final states, without a tokens × vocabulary tensor."""

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
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import hooked, overridden

# A block of logits of this size stays in the cache between the product and the exponentials.
_ROWS, _COLUMNS = 1024, 1024
_ENTRIES = 2**22  # entries of positions × vocabulary formed at once with the model's own forward
_WHOLE = 2**25  # most entries for a window's own forward
_WIDENED = 2**20  # entries converted to float32 at once, with their exponentials
_TOKENS = 32  # tokens for testing the head; fewer if their logits exceed a block
_SAME = 1e-4  # plus two units in the last place, since two kernels need not agree in half precision
# Largest logits of the states for testing the head, high enough to reveal a cap.
_HEIGHTS = 16.0 ** torch.arange(-1, 6)


class Scorer:
    """Mean loss of every window, `mean_t (log Σ_v exp z_tv − z_t,y)`, and its final state.

    If the logits come from the head's matrix alone, the sum over the vocabulary is taken block by block. This is tested
    once against the model's own logits, on a few tokens and on states scaled to logits of 1/16 to 2²⁰ of both signs,
    since a cap changes only large ones. If the model does more (a scale, a cap), its own forward is used. `enters` says
    whether its logits are a function of the final state alone, which `decoder` returns.
    """

    def __init__(self, decoder: Decoder, ids: torch.Tensor) -> None:
        self.model, self.structure = model, structure = decoder.model, decoder.structure
        self.head: Any = model.get_output_embeddings()
        if self.head is None:
            raise LyapunovPruneError(
                f"{type(model).__name__} has no language-model head, so it makes no predictions; rank by hidden states "
                "(--criterion bi), or give the model with its head"
            )
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
            logits = _logits(model, ids)[0]
        state = (finals[0] if finals else final_state(structure, ids))[0]  # OPT's model bypasses its backbone's forward
        # The model's own forward gives the logits of any state that its decoder is made to return, ...
        own = [(module, output) for module, output in answers if _same(output[0][0], [state])]
        self.decoder: Any = own[-1][0] if own else None
        self._answer: Any = own[-1][1] if own else None
        # ... unless it uses another module, or more of the decoder than its state.
        self.enters = bool(own) and self._takes_blocks(state) and _same(self.own(state), logits.split(_COLUMNS, -1))
        self.blockwise = (
            self.enters and state.shape[-1] == self.head.weight.shape[-1] and self._bare_is_own(state, logits)
        )

    def __call__(self, ids: torch.Tensor) -> tuple[list[float], torch.Tensor]:
        """The mean loss of each window in nats, summed in float64, and the final state (windows × tokens × width)."""
        if self.blockwise:
            state = final_state(self.structure, ids)
            return [self._loss(rows[:-1], wanted[1:]) for rows, wanted in zip(state, ids, strict=True)], state
        if self.enters and is_large(self.model, ids):
            state = final_state(self.structure, ids)
            return [self.loss(rows, wanted) for rows, wanted in zip(state, ids, strict=True)], state
        states: list[torch.Tensor] = []
        with hooked(after=[(self.structure.backbone, lambda module, args, kwargs, output: states.append(output[0]))]):
            logits = _logits(self.model, ids)
        state = states[0] if states else final_state(self.structure, ids)  # a model may bypass its backbone's forward
        return [next_token_loss(rows, wanted) for rows, wanted in zip(logits, ids, strict=True)], state

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """The model's logits of final states: tokens × width to tokens × vocabulary, in the model's dtype.

        If the head's matrix does not give them, the model's own forward does, with its decoder returning `state`.
        Raises LyapunovPruneError if that forward depends on more than its decoder's state, or gives no finite logits.
        """
        if self.blockwise:
            return self._bare(state)
        self._require_entered()
        return self.own(state)

    def reads_as(self, other: Scorer) -> bool:
        """Whether `other` gives the same logits for every state: both use only the head's matrix, the same one."""

        def same(key: str) -> bool:
            a, b = (getattr(scorer.head, key, None) for scorer in (self, other))
            if a is None or b is None:
                return a is b
            return a.dtype == b.dtype and torch.equal(a, b.to(a.device))

        return self.blockwise and other.blockwise and same("weight") and same("bias")

    def tiles(self, state: torch.Tensor, columns: int) -> Iterator[torch.Tensor]:
        """`logits` of a final state (tokens × width), `columns` of the vocabulary at a time.

        If the head's matrix gives them, no more than these are formed at once.
        """
        return self._bare_tiles(state, columns) if self.blockwise else iter(self.logits(state).split(columns, -1))

    def blocks(self, state: torch.Tensor) -> Iterator[torch.Tensor]:
        """The model's own `logits` of a final state (tokens × width), a block of positions at a time."""
        self._require_entered()
        yield from (self.own(rows) for (rows,) in self.split(state))

    def split(self, *of: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Split tensors with one row per position into blocks whose logits are formed at once."""
        return zip(*(each.split(self._rows) for each in of), strict=True)

    def loss(self, state: torch.Tensor, ids: torch.Tensor) -> float:
        """`next_token_loss` of one window from its final state (tokens × width), by `blocks`.

        Raises LyapunovPruneError as `logits` does.
        """
        return float(mean_over(self.blocks(state[:-1]), ids[1:], loss_sum))

    def _require_entered(self) -> None:
        if not self.enters:
            raise LyapunovPruneError(
                f"the logits of {type(self.model).__name__} are not finite, or no function of its final state alone; "
                "load it in a wider dtype, or give another decoder"
            )

    def _takes_blocks(self, state: torch.Tensor) -> bool:
        """Whether the model's forward accepts fewer positions than the text has (ProphetNet reshapes by that)."""
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
        """`log Σ_v exp z_v − z_y` of every row, in float32; `z_y` is rounded like the other logits."""
        own, total = torch.zeros(2, len(rows), 1, device=rows.device)
        shift = total
        for number, tile in enumerate(self.tiles(rows, _COLUMNS)):
            z = tile.float()
            at = targets.unsqueeze(-1) - number * _COLUMNS
            column = at.clamp(0, z.shape[-1] - 1)
            own = torch.where(at == column, z.gather(-1, column), own)
            if number == 0:  # use the first tile's maximum for all, to save a pass over the vocabulary
                shift = z.amax(-1, keepdim=True)
            total += z.sub_(shift).exp_().sum(-1, keepdim=True)
        if total.isfinite().all():
            return (total.log() + (shift - own)).squeeze(-1)
        # A later tile exceeds the first by more than exp can represent.
        return torch.stack([z.float().logsumexp(-1) for z in self.tiles(rows, _COLUMNS)]).logsumexp(0) - own.squeeze(-1)

    def _bare_is_own(self, state: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether the head's matrix gives the model's own logits, for `state` and for far larger and smaller states.

        Values beyond half precision (65,504) are left out.
        """
        sizes = _largest(logits.float())
        row = state[sizes.argmax().to(state.device)].float()
        scales = torch.cat([_HEIGHTS, -_HEIGHTS]).to(state.device) / sizes.max().to(state.device)
        scaled = (scales.unsqueeze(-1) * row).to(state.dtype)
        rows, own = torch.cat([state, scaled]), torch.cat([logits, *(self.own(some) for (some,) in self.split(scaled))])
        away, size = _away(own, self._bare_tiles(rows, _COLUMNS))  # read the head once for all
        held = size.isfinite() & (_largest(own) != torch.inf) & rows.isfinite().all(-1).to(size.device)
        return bool((away <= _rounding(own) * size)[held].all())

    def _bare(self, state: torch.Tensor) -> torch.Tensor:
        return linear(state.to(self.head.weight.device), self.head.weight, self.head.bias)

    def _bare_tiles(self, state: torch.Tensor, columns: int) -> Iterator[torch.Tensor]:
        """`_bare` in tiles of `columns`."""
        W, bias = self.head.weight, self.head.bias
        state = state.to(W.device)
        for start in range(0, len(W), columns):
            part = slice(start, start + columns)
            yield linear(state, W[part], None if bias is None else bias[part])

    def own(self, state: torch.Tensor) -> torch.Tensor:
        """The logits of the model's own forward if its decoder returns `state` (tokens × width); needs `enters`."""
        answer = type(self._answer)(**{**self._answer, next(iter(self._answer)): state[None]})
        ids = torch.zeros(1, len(state), dtype=torch.int64, device=next(self.decoder.parameters()).device)
        with overridden(self.decoder, lambda *args, **kwargs: answer):
            return self.model(ids, use_cache=False).logits[0]


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


def rows_at_once(vocabulary: int) -> int:
    """Number of positions whose logits are formed at once with the model's own forward."""
    return max(1, _ENTRIES // vocabulary)


def is_large(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Whether the logits of these windows are too many for one forward."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return weight is not None and ids.numel() * len(weight) > _WHOLE


def _same(rows: torch.Tensor, tiles: Iterable[torch.Tensor]) -> bool:
    """Whether every row (logits or a state) equals the tiles side by side, up to rounding."""
    away, size = _away(rows, tiles)
    return bool((away <= _rounding(rows) * size).all())


def _rounding(rows: torch.Tensor) -> float:
    """Tolerance for entries of a row, relative to its largest, between two kernels that compute in its dtype."""
    return max(_SAME, 2 * torch.finfo(rows.dtype).eps)


def _away(logits: torch.Tensor, tiles: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """For every row: the largest difference between logits and the tiles side by side, and the tiles' largest entry.

    The difference is infinite if the shapes differ.
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
    """The largest magnitude of every row, without a copy."""
    low, high = rows.aminmax(dim=-1)
    return torch.maximum(high, -low)


_CHUNK = 512  # tokens whose logits are converted at a time


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Mean loss in nats of one window: `logits` are tokens × vocabulary, `ids` its tokens; the first is not scored.

    Logits are converted to float32 a chunk of tokens at a time; losses are summed in float64.
    """
    return float(mean_over(scored_in(logits), ids[1:], loss_sum))


def scored_in(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The scored logits of a window (tokens × vocabulary), all but the last, in chunks."""
    return logits[:-1].split(_CHUNK)


def loss_sum(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """`Σ_t (log Σ_v exp z_tv − z_t,y)` in float64; `logits` are tokens × vocabulary, `wanted` the next tokens."""
    rows = max(1, _WIDENED // logits.shape[-1])
    parts = zip(logits.split(rows), wanted.split(rows), strict=True)
    losses = [F.cross_entropy(z.float(), y, reduction="none") for z, y in parts]
    return lift(torch.cat(losses)).sum().cpu()


# Sums a quantity over tokens, given logits (tokens × vocabulary) and the next tokens.
Sum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mean_over(blocks: Iterable[torch.Tensor], wanted: torch.Tensor, total: Sum) -> torch.Tensor:
    """The mean over the `wanted` tokens of the quantity that `total` sums, given their logits in blocks."""
    sums, start = list[torch.Tensor](), 0
    for logits in blocks:
        sums.append(total(logits, wanted[start : start + len(logits)].to(logits.device)))
        start += len(logits)
        del logits  # free the block before the next is made
    return torch.stack(sums).sum(0) / len(wanted)
