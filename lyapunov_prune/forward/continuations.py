"""Log-likelihoods of texts with a common beginning, which runs once; logits are formed only where they are scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lyapunov_prune.data.batch import filled
from lyapunov_prune.data.choices import shared_start
from lyapunov_prune.forward.hooks import require_finite
from lyapunov_prune.forward.logits import CACHE_LIMIT, deviation
from lyapunov_prune.forward.prefix import final_state
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.positions import alike, rotation


class Continuations:
    """`Σ_t log p(y_t | preceding tokens)` over the last tokens y of each text, and whether all are the likeliest.

    The common beginning of the texts runs once and its cache is shared; logits are formed only at scored positions. The
    first texts that share a beginning test whether the model gives the same through its cache as without; if not, every
    text runs whole. `possible` says whether the logits are a function of the final state at all; if not, use the model
    itself.

    The last token of a text is not read, since it predicts nothing. Texts whose lengths use different rotary positions
    (`models.positions`) are not read together, so each gives the same as alone.
    """

    def __init__(self, decoder: Decoder, ids: torch.Tensor) -> None:
        """`ids`: windows of token ids on which the head is tested."""
        self.structure = decoder.structure
        self.scorer = Scorer(decoder, ids)
        self.possible = self.scorer.enters
        self.device = decoder.model.device
        self.limit = CACHE_LIMIT[decoder.model.dtype]
        self.cached: bool | None = None  # None: not tested yet

    def __call__(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[tuple[float, bool]]:
        """For each text of token ids: its log-likelihood over the last `scored` tokens, and whether all are likeliest.

        In nats, summed in float64.

        Raises NonFiniteError naming the layer, or LyapunovPruneError, if the result is not finite.
        """
        wanted = torch.cat([torch.tensor(text[-count:]) for text, count in zip(texts, scored, strict=True)])
        states = torch.cat(self._states(texts, scored))
        parts = [self._answers(rows, tokens) for rows, tokens in self.scorer.split(states, wanted)]
        log_p, likeliest = (torch.cat(columns).split(list(scored)) for columns in zip(*parts, strict=True))
        sums = [float(each.sum()) for each in log_p]
        for text, each in zip(texts, log_p, strict=True):
            require_finite(self.structure, torch.tensor([list(text)]), "an item", each)
        return [(total, bool(each.all())) for total, each in zip(sums, likeliest, strict=True)]

    def _answers(self, rows: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.scorer.logits(rows).float()
        tokens = tokens.to(z.device)
        own = z.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return lift(own - z.logsumexp(-1)).cpu(), (z.argmax(-1) == tokens).cpu()

    def _states(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[torch.Tensor]:
        """For each text, the final states (scored × width) that predict its last tokens."""
        read = [text[:-1] for text in texts]
        found: dict[int, torch.Tensor] = {}
        for places in alike(self.structure.config, list(map(len, read))):
            together = self._together([read[i] for i in places], [scored[i] for i in places])
            found |= dict(zip(places, together, strict=True))
        return [found[i] for i in range(len(texts))]

    def _together(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[torch.Tensor]:
        """`_states` of texts with the same rotary positions."""
        shared = min(
            shared_start(texts), *(len(text) - count for text, count in zip(texts, scored, strict=True))
        )  # the state that predicts the first scored token may not be part of the beginning
        config = self.structure.config
        stale = rotation(config, shared) != rotation(config, len(texts[0]))
        if len(texts) == 1 or shared < 1 or stale or self.cached is False:
            return self._picked(self._whole(texts), texts, scored, 0)
        if self.cached is None:
            whole = self._picked(self._whole(texts), texts, scored, 0)
            try:
                again = self._picked(self._continued(texts, shared), texts, scored, shared)
            except Exception:  # a decoder without such a cache fails in its own way
                self.cached = False
            else:
                self.cached = deviation(torch.cat(again), torch.cat(whole)) <= self.limit
            return whole
        return self._picked(self._continued(texts, shared), texts, scored, shared)

    def _whole(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        return final_state(self.structure, filled(texts).to(self.device))

    def _continued(self, texts: Sequence[Sequence[int]], shared: int) -> torch.Tensor:
        """The states after the first `shared` tokens, which all texts have in common and run once."""
        backbone: Any = self.structure.backbone
        beginning = torch.tensor([list(texts[0][:shared])], device=self.device)
        cache = backbone(input_ids=beginning, use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(texts))
        ids = filled([text[shared:] for text in texts]).to(self.device)
        # Without positions, some forwards count from zero again.
        positions = torch.arange(shared, shared + ids.shape[1], device=self.device).expand_as(ids)
        return backbone(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)[0]

    def _picked(
        self, states: torch.Tensor, texts: Sequence[Sequence[int]], scored: Sequence[int], before: int
    ) -> list[torch.Tensor]:
        ends = [len(text) - before for text in texts]
        return [row[end - count : end] for row, end, count in zip(states, ends, scored, strict=True)]
