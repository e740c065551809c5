"""Greedy decoding through whatever cache a decoder keeps."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def decode_greedily(model: PreTrainedModel, prompts: torch.Tensor, steps: int) -> torch.Tensor:
    """The `steps` likeliest tokens one after the other: prompts (windows × tokens) to (windows × steps), int64.

    Each is the argmax of the model's own logits. Nothing else has a say: the model's generation config (its
    penalties, its EOS) is not asked, so decoding goes on behind the end of a text. A decoder that hands no cache
    back runs on the whole text again at every step.
    """
    taken = inspect.signature(model.forward).parameters
    few: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
    ids = prompts
    output = model(ids, use_cache=True, **few)
    for step in range(steps):
        ids = torch.cat([ids, output.logits[:, -1:].argmax(-1).to(ids)], dim=1)
        if step == steps - 1:
            break
        # What the forward both returns and takes: past_key_values, cache_params, state, mems, ...
        carried = {name: value for name, value in output.items() if name in taken and value is not None}
        if carried and "position_ids" in taken:  # some forwards count from zero at every call without it
            carried["position_ids"] = torch.full_like(ids[:, -1:], ids.shape[1] - 1)
        output = model(ids[:, -1:] if carried else ids, use_cache=True, **few, **carried)
    return ids[:, prompts.shape[1] :]
