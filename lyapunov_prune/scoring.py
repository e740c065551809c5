"""Losses of windows from the states that the head reads, without a tokens × vocabulary tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from lyapunov_prune.evaluation.perplexity import next_token_loss
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.prefix import final_state

# A block of logits this large stays in the cache between the product and the exponentials.
_ROWS, _COLUMNS = 1024, 1024
_TOKENS = 32
_SAME = 1e-4


class Scorer:
    """Mean loss of every window, `mean_t (log Σ_v exp z_tv − z_t,y)`, and the state that gave it.

    Where the logits are those of the head's matrix (tried once against the model's own on a few tokens), the
    sum over the vocabulary is taken block by block. Where the model does more to them (a scale, a cap), its
    own logits are used.
    """

    def __init__(self, model: PreTrainedModel, structure: Structure, ids: torch.Tensor) -> None:
        self.model, self.structure = model, structure
        self.head: Any = model.get_output_embeddings()
        ids = ids[:1, :_TOKENS]
        logits = model(ids, use_cache=False).logits[0].float()
        state = final_state(structure, ids)[0]
        bare = self._logits(state).float() if state.shape[-1] == self.head.weight.shape[-1] else logits[:0]
        self.blockwise = bare.shape == logits.shape and bool((bare - logits).abs().max() <= _SAME * logits.abs().max())

    def __call__(self, ids: torch.Tensor) -> tuple[list[float], torch.Tensor]:
        """The mean loss of each window, in nats, summed in float64, and the final state (windows × tokens × width)."""
        if self.blockwise:
            state = final_state(self.structure, ids)
            return [self._loss(rows[:-1], targets[1:]) for rows, targets in zip(state, ids, strict=True)], state
        states: list[torch.Tensor] = []
        handle = self.structure.backbone.register_forward_hook(lambda module, args, output: states.append(output[0]))
        try:
            logits = self.model(ids, use_cache=False).logits
        finally:
            handle.remove()
        return [next_token_loss(rows, targets) for rows, targets in zip(logits, ids, strict=True)], states[0]

    def _loss(self, state: torch.Tensor, targets: torch.Tensor) -> float:
        W, bias = self.head.weight, self.head.bias
        state, targets = state.to(W.device), targets.to(W.device)
        total = 0.0
        for rows, wanted in zip(state.split(_ROWS), targets.split(_ROWS), strict=True):
            logsumexp: torch.Tensor | None = None
            for start in range(0, len(W), _COLUMNS):
                part = slice(start, start + _COLUMNS)
                block = linear(rows, W[part], None if bias is None else bias[part]).float().logsumexp(-1)
                logsumexp = block if logsumexp is None else torch.logaddexp(logsumexp, block)
            assert logsumexp is not None
            own = (rows.float() * W[wanted].float()).sum(-1)
            if bias is not None:
                own = own + bias[wanted].float()
            total += float((logsumexp - own).double().sum())
        return total / len(targets)

    def _logits(self, state: torch.Tensor) -> torch.Tensor:
        return linear(state.to(self.head.weight.device), self.head.weight, self.head.bias)
