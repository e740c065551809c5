"""Replace weights of a model inside a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.models.projections import Projection


def with_parts(module: nn.Module, key: str, parts: Mapping[Projection, torch.Tensor]) -> nn.Parameter:
    """A new parameter like `module.key`, with other matrices (output × input) for some of its parts."""
    before: Any = module._parameters[key]
    stored = before.detach().clone()
    for p, W in parts.items():
        p.rows(stored).copy_(W)
    return nn.Parameter(stored, requires_grad=before.requires_grad)


@contextmanager
def exchanged(module: nn.Module, key: str, parameter: nn.Parameter) -> Iterator[None]:
    """Inside the block `module.key` is `parameter`; a tensor tied to the old one elsewhere keeps its values."""
    before = module._parameters[key]
    module._parameters[key] = parameter
    try:
        yield
    finally:
        module._parameters[key] = before


@contextmanager
def with_data(data: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Inside the block, these parameters have other data, wherever they are used."""
    before = {parameter: parameter.data for parameter in data}
    try:
        for parameter, tensor in data.items():
            parameter.data = tensor
        yield
    finally:
        for parameter, tensor in before.items():
            parameter.data = tensor


@contextmanager
def replaced(model: PreTrainedModel, weights: Mapping[Projection, torch.Tensor]) -> Iterator[None]:
    """Run `model` with other matrices (output × input, as from `Projection.weight`) inside the block.

    The model is restored bit for bit, also after an exception.
    """
    by_parameter: dict[tuple[str, str], dict[Projection, torch.Tensor]] = {}
    for p, W in weights.items():
        by_parameter.setdefault((p.module, p.parameter), {})[p] = W
    with ExitStack() as stack:
        for (name, key), parts in by_parameter.items():
            module = model.get_submodule(name)
            stack.enter_context(exchanged(module, key, with_parts(module, key, parts)))
        yield
