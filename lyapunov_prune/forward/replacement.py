"""Replace weights of a model inside a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.models.projections import Projection


class Replacement:
    """A parameter that replaces `module.key` while installed, with other matrices for some of its parts.

    It is a new parameter, so a tensor tied to the old one elsewhere keeps its values.
    """

    def __init__(self, module: nn.Module, key: str, parts: Mapping[Projection, torch.Tensor]) -> None:
        before = module._parameters[key]
        assert before is not None
        self.module, self.key, self.before = module, key, before
        stored = before.detach().clone()
        for p, W in parts.items():
            p.rows(stored).copy_(W)
        self.after = nn.Parameter(stored, requires_grad=before.requires_grad)

    def install(self) -> None:
        self.module._parameters[self.key] = self.after

    def remove(self) -> None:
        self.module._parameters[self.key] = self.before


@contextmanager
def replaced(model: PreTrainedModel, weights: Mapping[Projection, torch.Tensor]) -> Iterator[None]:
    """Run `model` with other matrices (output × input, as from `Projection.weight`) inside the block.

    The model is restored bit for bit, also after an exception.
    """
    by_parameter: dict[tuple[str, str], dict[Projection, torch.Tensor]] = {}
    for p, W in weights.items():
        by_parameter.setdefault((p.module, p.parameter), {})[p] = W
    with ExitStack() as stack:
        for (module, key), parts in by_parameter.items():
            replacement = Replacement(model.get_submodule(module), key, parts)
            replacement.install()
            stack.callback(replacement.remove)
        yield
