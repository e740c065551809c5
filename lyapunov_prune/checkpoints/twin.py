"""A twin of a model that shares everything with it except the layers, which compute nothing.

It finds the arguments that the model's own forward gives to a layer, and what it makes of the last layer's output,
without running any layer.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.forward.hooks import Enough, layer_input
from lyapunov_prune.models.structure import Structure

_HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]


class Twin:
    """Twins of the modules on the path to the layers.

    `pairs` are the modules of `model`, from the parent of the layers up to the model itself, each with its twin.
    `widths` are the lengths of the tuples that layers return; whoever runs the layers fills it.
    """

    def __init__(self, model: PreTrainedModel, structure: Structure) -> None:
        self.widths: dict[int, int] = {}
        self.pairs: list[tuple[nn.Module, nn.Module]] = []
        self._structure = structure
        self._wanted = -1  # the layer whose arguments are wanted, and these
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._leaving: torch.Tensor | None = None  # replaces the state at the last layer
        path = structure.layers_path.split(".")
        modules = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
        twin = _bare(modules.pop())
        twin._modules = {str(i): self._stub(i, layer) for i, layer in enumerate(structure.layers)}
        while modules:
            module, inside, key = modules.pop(), twin, path[len(modules)]
            twin = _bare(module)
            twin._modules = {**module._modules, key: inside}
            self.pairs.append((module, twin))

    def arguments(
        self, index: int, twin: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of layer `index` if `twin` is called with these; the state in them is meaningless."""
        self._wanted = index
        try:
            with suppress(Enough):
                twin(*args, **kwargs)
        finally:
            self._wanted = -1
        return self._given

    def finish(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The state that the head reads if `hidden` is the last layer's output in a forward of `ids`."""
        (backbone,) = [twin for module, twin in self.pairs if module is self._structure.backbone]
        self._leaving = hidden
        try:
            return backbone(input_ids=ids, use_cache=False)[0]
        finally:
            self._leaving = None

    def _stub(self, index: int, layer: nn.Module) -> nn.Module:
        """A layer that returns its input state, or records its arguments and stops."""
        stub = _bare(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if index == self._wanted:
                self._given = args, kwargs
                raise Enough
            hidden, width = layer_input(args, kwargs), self.widths.get(index, 0)
            if self._leaving is not None and index == self._structure.num_layers - 1:
                hidden = self._leaving
            return (hidden, *[None] * (width - 1)) if width else hidden

        stub.forward = forward
        return stub


def _bare(module: nn.Module) -> Any:
    """A shallow copy of `module` without its hooks."""
    twin = copy.copy(module)
    for name in _HOOKS:
        vars(twin)[name] = type(vars(twin)[name])()
    return twin
