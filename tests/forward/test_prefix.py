"""A forward that begins at a layer is the whole forward, or the boundary is not offered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import LAYERS, computed, hooks_of, leave, make_tiny
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.forward import hooks
from lyapunov_prune.forward.hooks import final_state, residual_stream, run_backbone, skipped
from lyapunov_prune.forward.prefix import Prefix
from lyapunov_prune.models.structure import Structure, find_structure


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def boundaries(structure: Structure, ids: torch.Tensor) -> list[torch.Tensor]:
    states: list[torch.Tensor] = []
    with residual_stream(structure, lambda layer, h: states.append(h.clone())):
        run_backbone(structure, ids)
    return states


def patched(model: PreTrainedModel) -> list[int]:
    return [i for i, layer in enumerate(find_structure(model).layers) if "forward" in layer.__dict__]


def test_every_boundary_gives_the_final_state_of_the_whole_forward(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    structure = find_structure(model)
    found = Prefix(structure, ids)
    assert found.entries == tuple(range(LAYERS + 1))
    whole, calls = final_state(structure, ids), computed(model)
    for boundary, hidden in enumerate(boundaries(structure, ids)):
        calls.clear()
        with found.entered(boundary, hidden):
            torch.testing.assert_close(final_state(structure, ids), whole, rtol=1e-6, atol=1e-6)
        assert dict(calls) == dict.fromkeys(range(boundary, LAYERS), 1)
    assert torch.equal(final_state(structure, ids), whole)


def test_a_bypassed_layer_does_not_compute_and_is_as_a_skipped_one(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    structure = find_structure(model)
    found, calls = Prefix(structure, ids), computed(model)
    for layers in ((), (0,), (LAYERS - 1,), (1, 2, 4), range(LAYERS)):
        with skipped(structure, tuple(layers)):
            wanted = model(ids, use_cache=False).logits
        calls.clear()
        with found.bypassed(layers):
            torch.testing.assert_close(model(ids, use_cache=False).logits, wanted, rtol=1e-6, atol=1e-6)
        assert set(calls) == set(range(LAYERS)) - set(layers)


def test_advance_walks_from_boundary_to_boundary(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    structure = find_structure(model)
    found, calls, states = Prefix(structure, ids), computed(model), boundaries(structure, ids)
    hidden: torch.Tensor | None = None
    for start, stop in ((0, 1), (1, 2), (2, 5)):
        calls.clear()
        hidden = found.advance(ids, start, hidden, stop)
        torch.testing.assert_close(hidden, states[stop], rtol=1e-6, atol=1e-6)
        assert sorted(calls) == list(range(start, stop))
    assert not patched(model)


def test_planted_fault_a_boundary_that_does_not_reproduce_is_not_offered(
    llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering = Prefix._answering

    def off(self: Prefix, layers: range, answer: Callable[..., torch.Tensor]) -> Any:
        return answering(self, layers, lambda *args: answer(*args) * (1.01 if len(layers) == 3 else 1))

    monkeypatch.setattr(Prefix, "_answering", off)
    assert Prefix(find_structure(llama), ids).entries == (0, 1, 2, 4, 5, 6)


def test_nothing_is_left_behind(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    structure = find_structure(model)
    hidden = boundaries(structure, ids)[3]
    found = Prefix(structure, ids)
    assert hooks_of(model) == 0
    for block in (found.entered(3, hidden), found.bypassed((0, 1, 4))):
        with pytest.raises(RuntimeError, match="planted"), block:
            raise RuntimeError(f"planted {patched(model)[1]}")
        assert not patched(model)
        assert hooks_of(model) == 0


def test_an_advance_that_fails_leaves_nothing_behind(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    structure = find_structure(model)
    found, hidden = Prefix(structure, ids), boundaries(structure, ids)[1]
    with pytest.raises(RuntimeError):
        found.advance(ids, 1, hidden[..., :5], 4)
    assert not patched(model)
    assert hooks_of(model) == 0


def test_a_forward_that_was_on_the_instance_is_put_back(ids: torch.Tensor) -> None:
    """Hooks of accelerate live there."""
    model = make_tiny("llama")
    structure = find_structure(model)
    layer: Any = structure.layers[1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    before = layer.forward
    found = Prefix(structure, ids)
    with found.entered(3, boundaries(structure, ids)[3]):
        assert layer.forward is not before
    assert layer.forward is before
    assert patched(model) == [1]


class Pair(nn.Module):
    """A layer of the older kind, that returns a tuple."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return self.layer(*args, **kwargs), None


def test_layers_that_return_tuples_are_answered_for_in_kind(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama")
    structure = find_structure(model)
    whole = final_state(structure, ids)
    for index, layer in enumerate(list(structure.layers)):
        structure.layers[index] = Pair(layer)
    call = nn.Module.__call__

    def unpack(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What an older decoder does between its layers."""
        if args and isinstance(args[0], tuple):
            hidden, nothing = args[0]
            assert nothing is None
            args = (hidden, *args[1:])
        return call(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", unpack)
    torch.testing.assert_close(final_state(structure, ids), whole)
    found = Prefix(structure, ids)
    assert found.entries == tuple(range(LAYERS + 1))
    with found.entered(4, boundaries(structure, ids)[4]):
        torch.testing.assert_close(final_state(structure, ids), whole)


# Layers that use more of earlier ones than their hidden state.


@pytest.mark.parametrize("taken", [True, False], ids=["taken away", "left for ever"])
@pytest.mark.parametrize(("writer", "reader"), [(2, 3), (1, 4), (0, 5)])
def test_no_forward_begins_between_a_layer_and_what_it_needs(
    writer: int, reader: int, taken: bool, ids: torch.Tensor
) -> None:
    model = make_tiny("llama")
    leave(model, writer, reader, taken=taken)
    structure = find_structure(model)
    found = Prefix(structure, ids)
    between = range(writer + 1, reader + 1)
    assert found.entries == tuple(k for k in range(LAYERS + 1) if k not in between)
    assert [found.entry(k) for k in between] == [writer] * len(between)
    assert found.entry(reader + 1) == reader + 1
    whole, states = final_state(structure, ids), boundaries(structure, ids)
    final_state(structure, ids.flip(1))  # leaves what belongs to other tokens
    for k in found.entries:
        with found.entered(k, states[k]):
            torch.testing.assert_close(final_state(structure, ids), whole)


def test_a_model_that_is_not_finite_has_no_entry_but_the_first(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    find_structure(model).layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    assert Prefix(find_structure(model), ids).entries == (0,)


def test_a_few_tokens_of_one_window_are_tried(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: set[tuple[int, ...]] = set()

    def seen(structure: Structure, ids: torch.Tensor) -> None:
        shapes.add(tuple(ids.shape))
        run_backbone(structure, ids)

    monkeypatch.setattr(hooks, "run_backbone", seen)
    Prefix(find_structure(llama), torch.arange(80).view(2, 40))
    assert shapes == {(1, 32)}
