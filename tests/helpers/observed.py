"""What a model computes and holds, observed from outside."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.forward.anatomy import anatomy_of
from lyapunov_prune.forward.branches import Branch
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.contraction import measure_contraction
from lyapunov_prune.profiles.contraction_profile import ContractionProfile


def states_of(model: PreTrainedModel, ids: torch.Tensor, moved: torch.Tensor | None = None) -> list[torch.Tensor]:
    """`h_0 … h_L` by wrapping the layers' forward methods: no hooks, no batching of clean and perturbed."""
    layers = find_structure(model).layers
    states: list[torch.Tensor] = []
    originals = [layer.forward for layer in layers]

    def wrap(index: int) -> Any:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if index == 0:
                hidden_states = hidden_states + (0 if moved is None else moved)
                states.append(hidden_states)
            output = originals[index](hidden_states, *args, **kwargs)
            states.append(output if isinstance(output, torch.Tensor) else output[0])
            return output

        return forward

    for index, layer in enumerate(layers):
        layer.forward = wrap(index)
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        for layer in layers:
            del layer.forward
    return states


def computed(model: PreTrainedModel) -> Counter[int]:
    """How often each layer really computes from now on: calls of its first matrix."""
    calls: Counter[int] = Counter()
    for index, layer in enumerate(find_structure(model).layers):
        inner = next(m for m in layer.modules() if getattr(m, "weight", None) is not None and m.weight.ndim == 2)
        inner.register_forward_pre_hook(lambda module, args, index=index: calls.update([index]))
    return calls


def leave(model: PreTrainedModel, writer: int, reader: int, *, taken: bool) -> None:
    """Layer `reader` adds what layer `writer` left on itself, and takes it away if `taken`."""
    layers: Any = find_structure(model).layers

    def write(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        layers[writer].left = output.clone()

    def read(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        left = layers[writer].left
        if taken:
            del layers[writer].left
        return output + left

    layers[writer].mlp.register_forward_hook(write)
    layers[reader].mlp.register_forward_hook(read)


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


RHO = (2.0, 0.5, 1.5, 0.25, 1.0, 3.0)


def profile_of(model: PreTrainedModel, rho: Sequence[float] = RHO) -> ContractionProfile:
    """A profile of the model with factors of our choice."""
    measured = measure_contraction(model, torch.ones(1, 4, dtype=torch.int64), seeds=[0])
    energies = np.cumprod([1e-4, *rho])
    return with_energies(measured, energies)


def with_energies(profile: ContractionProfile, energies: np.ndarray) -> ContractionProfile:
    return dataclasses.replace(profile, energies={"energy": energies, "token": energies})


def inputs_of(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What enters every matrix in one whole forward: tokens × n, float64."""
    found: dict[str, list[torch.Tensor]] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: found.setdefault(name, []).append(args[0].detach().double().flatten(0, -2))
        )
        for name in {p.module for p in find_projections(wrap(model))}
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def branches_of(model: PreTrainedModel, ids: torch.Tensor) -> list[tuple[tuple[Branch, ...], torch.Tensor]]:
    """For each layer its branches and what it returned."""
    structure = find_structure(model)
    found: list[tuple[tuple[Branch, ...], torch.Tensor]] = []

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        parts = anatomy_of(structure, len(found), args, kwargs).parts.values()
        found.append(
            (
                tuple(branch for part in parts for branch in part.branches),
                output if isinstance(output, torch.Tensor) else output[0],
            )
        )

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in structure.layers]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def bits(model: PreTrainedModel) -> dict[str, tuple[int, torch.Tensor]]:
    """Every parameter: which tensor it is, and a copy of its numbers."""
    return {name: (id(p), p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)}


def assert_same(model: PreTrainedModel, before: dict[str, tuple[int, torch.Tensor]]) -> None:
    after = bits(model)
    assert after.keys() == before.keys()
    for name, (identity, numbers) in before.items():
        assert after[name][0] == identity, name
        assert torch.equal(after[name][1], numbers), name


def equal(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    """Whether both hold the same tensors under the same names."""
    return a.state_dict().keys() == b.state_dict().keys() and all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def captured(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Norms by module, from one forward of all windows together, squares summed by numpy in float64."""
    seen: dict[str, np.ndarray] = {}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen[name] = np.sqrt((args[0].double().numpy().reshape(-1, args[0].shape[-1]) ** 2).sum(0))

        return keep

    names = {p.module for p in find_projections(wrap(model))}
    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return seen
