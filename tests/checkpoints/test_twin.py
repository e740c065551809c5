"""A twin says what layers are called with and what follows the last one, and computes no layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_tiny
from torch import nn

from lyapunov_prune.checkpoints.layer_stream import Twin
from lyapunov_prune.forward.hooks import final_state, hidden_of
from lyapunov_prune.models.structure import find_structure


def ran(model: Any, ids: torch.Tensor) -> tuple[list[tuple[Any, Any]], list[torch.Tensor], torch.Tensor]:
    """What every layer is called with in a forward, what it returns, and what the head reads."""
    structure, called, returned = find_structure(model), list[tuple[Any, Any]](), list[torch.Tensor]()

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        called.append((args, kwargs))
        returned.append(hidden_of(output).clone())

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in structure.layers]
    final = final_state(structure, ids)
    for hook in hooks:
        hook.remove()
    return called, returned, final


def tensors(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    parts = given.values() if isinstance(given, dict) else given if isinstance(given, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@torch.no_grad()
def test_layers_are_called_as_in_the_model_itself(family: str, ids: torch.Tensor) -> None:
    model: Any = make_tiny(family)
    structure, (called, _, _) = find_structure(model), ran(model, ids)
    twin = Twin(model, structure)
    (backbone,) = [other for module, other in twin.pairs if module is structure.backbone]
    for layer, (args, kwargs) in enumerate(called):
        again, others = twin.arguments(layer, backbone, input_ids=ids, use_cache=False)
        assert others.keys() == kwargs.keys()
        for wanted, found in zip(tensors((args, kwargs))[1:], tensors((again, others))[1:], strict=True):
            assert torch.equal(found, wanted)


@torch.no_grad()
def test_what_leaves_the_last_layer_is_finished(
    family: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make_tiny(family)
    structure, (_, returned, final) = find_structure(model), ran(model, ids)
    twin = Twin(model, structure)
    for layer in structure.layers:
        monkeypatch.setattr(layer, "forward", None)  # none of them runs
    assert torch.equal(twin.ended(twin.backbone, ids, returned[-1])[0][0], final)
    other = torch.randn_like(returned[-1])
    assert not torch.allclose(twin.ended(twin.backbone, ids, other)[0][0], final, atol=1e-2)
