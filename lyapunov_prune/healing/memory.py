"""The memory that a step of healing needs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from lyapunov_prune.forward.hooks import run_backbone
from lyapunov_prune.forward.scoring import is_large, rows_at_once
from lyapunov_prune.healing.sharded import local
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import find_structure


@torch.enable_grad()
def needed(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter], window: torch.Tensor) -> int:
    """Bytes that training of `parameters` takes beside the models, with one window (1 × tokens) at a time.

    For each parameter its gradient, two moments and the best so far; what the layers store for the backward pass,
    counted in a forward that holds that of one layer at a time; the logits of both models, and their gradient.
    """
    structure = find_structure(model)
    held = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
    stored: dict[int, torch.UntypedStorage] = {}
    found = [4 * sum(local(p).nbytes for p in parameters.values())]

    def store(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:  # what several operations need is stored once
            stored[storage.data_ptr()] = storage

    def count(*_: object) -> None:
        found.append(sum(storage.nbytes() for storage in stored.values()))
        stored.clear()

    each = [(layer, count) for layer in dict.fromkeys(structure.layers)]  # one may occur several times
    with hooked(after=each), saved_tensors_hooks(store, lambda kept: kept):
        run_backbone(structure, window)
    vocabulary = structure.config.vocab_size
    rows = rows_at_once(vocabulary) if is_large(model, window) else window.numel()
    return sum(found) + 3 * model.dtype.itemsize * rows * vocabulary
