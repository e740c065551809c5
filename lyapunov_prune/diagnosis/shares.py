"""How much of the error each fault explains: it alone is put right in memory, and the KL measured again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from lyapunov_prune.diagnosis.sides import Sides, TensorPlace
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.predictions.spaces import divergences

_WINDOWS, _TOKENS = 2, 128  # a fault worth telling shows on few
_ROWS = 32  # positions whose probabilities are compared at once


class Restored:
    """`KL(dense ‖ file)` in nats a token on the first windows of `reading`, of the file as it is and put right."""

    def __init__(self, sides: Sides, reading: Reading) -> None:
        self.sides = sides
        self._ids = [window[:, :_TOKENS] for window in reading.windows(1)[:_WINDOWS]]
        self._dense = [self._logits(sides.dense.model, ids) for ids in self._ids]
        self.kl = self.of(sides.file.model)

    def of(self, model: PreTrainedModel) -> float:
        """The KL of this model from the dense one, at least 0; NaN if a logit is not finite."""
        total = positions = 0.0
        for ids, wanted in zip(self._ids, self._dense, strict=True):
            for z, given in zip(wanted.split(_ROWS), self._logits(model, ids).split(_ROWS), strict=True):
                total += float(divergences(*(each.double().log_softmax(-1) for each in (z, given)))[1].sum())
                positions += len(z)
        return total if math.isnan(total) else max(0.0, total / positions)

    def share(self, kl: float) -> float | None:
        """The part of the error that is gone at this KL; None if it cannot be told."""
        return 1 - kl / self.kl if self.kl > 0 and math.isfinite(self.kl) and math.isfinite(kl) else None

    @contextmanager
    def put_right(self, places: Sequence[TensorPlace]) -> Iterator[None]:
        """Inside the block these tensors of the file are those of the dense model."""
        file = dict(self.sides.file.model.named_parameters(remove_duplicate=False))
        dense = dict(self.sides.dense.model.named_parameters(remove_duplicate=False))
        before = []
        try:
            for place in places:
                if place.name in file:
                    target, source = file[place.name].data, dense[self.sides.dense_name(place)].data
                    target, source = (t if place.expert is None else t[place.expert] for t in (target, source))
                    before.append((target, target.clone()))
                    target.copy_(source)
            yield
        finally:
            for target, values in reversed(before):
                target.copy_(values)

    @staticmethod
    def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(ids.to(model.device), use_cache=False).logits[0].float().cpu()
        return logits
