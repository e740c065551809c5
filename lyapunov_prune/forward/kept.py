"""The logits of two models on the same inputs, compared a block of positions at a time.

Only the final states of a forward are stored. The logits of a block are what the model's own forward makes of these
states, with its head and any other operation on logits. No tokens × vocabulary tensor is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lyapunov_prune.forward.logits import SAME_LIMIT, deviation, only_last, uncached_logits
from lyapunov_prune.forward.scoring import Scorer, rows_at_once
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import hooked

_TRIED = 16  # positions at the end of each window where logits from stored states are tested


class KeptLogits:
    """The logits of a decoder or classifier on `inputs` (token ids or images), stored as final states.

    Logits are stored whole if they fit into one block, if the forward cannot form only the last ones, or if they are
    not a function of the decoder's state alone. The last is tested on the first tokens (`Scorer`) and at the end of
    every window, there within `SAME_LIMIT`, so that larger differences of logits reach the gate.
    """

    def __init__(self, decoder: Decoder, inputs: Sequence[torch.Tensor]) -> None:
        self._model = model = decoder.model
        head: Any = model.get_output_embeddings()
        self._block = rows_at_once(len(head.weight)) if hasattr(head, "weight") else 0
        large = [ids for ids in inputs if self._block and not ids.is_floating_point() and ids.numel() > self._block]
        taken = large and only_last(model, _TRIED)
        scorer = Scorer(decoder, large[0]) if taken else None
        self._scorer = scorer if scorer is not None and scorer.enters else None
        # For every input (states, True) or (logits, False), with one row per position.
        self._rows = [self._states(x) if any(x is ids for ids in large) else self._whole(x) for x in inputs]

    def deviation(self, reference: KeptLogits) -> float:
        """`logits.deviation` of these logits from the `reference`, the largest over all inputs."""
        worst = 0.0
        for mine, theirs in zip(self._rows, reference._rows, strict=True):
            for a, b in zip(self._blocks(*mine), reference._blocks(*theirs), strict=True):
                worst = max(worst, deviation(a, b))
                del a, b  # free them before the next blocks are made
        return worst

    def blocks(self) -> Iterator[torch.Tensor]:
        """The logits of all inputs in order, in blocks of positions × vocabulary."""
        for rows in self._rows:
            yield from self._blocks(*rows)

    def _whole(self, inputs: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return uncached_logits(self._model, inputs).flatten(0, -2), False

    def _states(self, ids: torch.Tensor) -> tuple[torch.Tensor, bool]:
        if self._scorer is None:
            return self._whole(ids)
        states: list[torch.Tensor] = []
        with hooked(after=[(self._scorer.decoder, lambda module, args, kwargs, output: states.append(output[0]))]):
            logits = self._model(ids, use_cache=False, **only_last(self._model, _TRIED)).logits[:, -_TRIED:]
        ends = zip(states[0][:, -_TRIED:], logits, strict=False)
        again = max(deviation(self._scorer.own(state), wanted) for state, wanted in ends)
        if states[0].shape[:-1] != ids.shape or again > SAME_LIMIT[self._model.dtype]:
            return self._whole(ids)
        return states[0].flatten(0, -2), True

    def _blocks(self, rows: torch.Tensor, states: bool) -> Iterator[torch.Tensor]:
        for block in rows.split(self._block or len(rows)):
            yield self._scorer.own(block) if states and self._scorer is not None else block
