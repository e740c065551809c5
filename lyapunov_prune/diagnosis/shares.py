"""How much of the error each fault explains: it alone is put right in memory, and the KL measured again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from lyapunov_prune.diagnosis.compared import Compared
from lyapunov_prune.diagnosis.sides import Sides, TensorPlace
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.predictions.spaces import kl_divergence

_WINDOWS, _TOKENS = 2, 128  # a fault worth telling shows on few
_ROWS = 32  # positions whose probabilities are compared at once
_NOTHING, _HARM = 1.6, 1.5  # a change of the KL by less than this factor is none; by more it is harm
_TIMES = 20
_PARTS = 12


class Restored:
    """`KL(dense ‖ file)` in nats a token on the first windows of `reading`, of the file as it is and put right."""

    def __init__(self, sides: Sides, reading: Reading, compared: Mapping[TensorPlace, Compared]) -> None:
        self.sides, self.compared = sides, compared
        self._ids = [window[:, :_TOKENS] for window in reading.windows(1)[:_WINDOWS]]
        self._dense = [self._logits(sides.dense.model, ids) for ids in self._ids]
        self.kl = self.of(sides.file.model)
        self._right: dict[tuple[TensorPlace, ...], float] = {}

    def kl_right(self, places: Sequence[TensorPlace]) -> float:
        """The KL with these tensors put right; it is measured once, also where two findings hold the same."""
        key = tuple(places)
        if key not in self._right:
            with self.put_right(key):
                self._right[key] = self.of(self.sides.file.model)
        return self._right[key]

    def made_up_for(self, changes: Sequence[Sequence[TensorPlace]], *, exact: bool) -> bool:
        """Whether these changes make up for each other, so that the file is the dense model in another form.

        Statistic: the KL with all of them put right but for noise of the size of their rounding, and with a part put
        right, those of one finding or one role. Thresholds: a part makes it half as large again, and worse by `_TIMES`
        of what all together take away. Changes that are not `exact` change the rounding too: there a part makes it half
        as large again, by the square more of what all together take away beyond a third.
        """
        every = [place for places in changes for place in places]
        with self.put_right(every, rounded=True):
            whole = self.of(self.sides.file.model)
        harm = _HARM * self.kl
        if exact:
            harm = max(harm, self.kl + _TIMES * (self.kl - whole))
        else:
            harm *= max(1.0, self.kl / max(_NOTHING * whole, 1e-12)) ** 2
        roles = [[p for p in every if p.role == role] for role in dict.fromkeys(p.role for p in every)]
        return any(self.kl_right(part) > harm for part in (every, *changes, *roles)[:_PARTS])

    def of(self, model: PreTrainedModel) -> float:
        """The KL of this model from the dense one, at least 0; NaN if a logit is not finite."""
        total = positions = 0.0
        for ids, wanted in zip(self._ids, self._dense, strict=True):
            for z, given in zip(wanted.split(_ROWS), self._logits(model, ids).split(_ROWS), strict=True):
                total += float(kl_divergence(*(each.double().log_softmax(-1) for each in (z, given))).sum())
                positions += len(z)
        return total if math.isnan(total) else max(0.0, total / positions)

    def share(self, kl: float) -> float | None:
        """The part of the error that is gone at this KL; None if it cannot be told."""
        return 1 - kl / self.kl if self.kl > 0 and math.isfinite(self.kl) and math.isfinite(kl) else None

    @contextmanager
    def put_right(self, places: Sequence[TensorPlace], *, rounded: bool = False) -> Iterator[None]:
        """Inside the block these tensors of the file are those of the dense model, or with noise as of rounding."""
        noise = torch.Generator().manual_seed(0)
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
                    if rounded and target.ndim > 1:
                        size = self.compared[place].stored * source.float().square().mean(-1, keepdim=True).sqrt()
                        target += size * torch.randn(target.shape, generator=noise).to(target.device)
            yield
        finally:
            for target, values in reversed(before):
                target.copy_(values)

    @staticmethod
    def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(ids.to(model.device), use_cache=False).logits[0].float().cpu()
        return logits
