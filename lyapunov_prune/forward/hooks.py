"""The residual stream of a decoder, observed and changed by hooks that are removed after the block."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from lyapunov_prune.data.examples import Examples, model_inputs
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.linalg import all_finite, require_numbers
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure

Visit = Callable[[int, torch.Tensor], None]
Inject = Callable[[torch.Tensor], torch.Tensor]


class Enough(Exception):
    """Raised by a hook to stop a forward that is not needed any further."""


def hidden_of(output: Any) -> torch.Tensor:
    """The hidden state that a decoder layer returned.

    Layers in transformers 5 return a tensor, older ones a tuple; `output[0]` of a tensor would be the first row of the
    batch. Raises LyapunovPruneError for named states (Reformer's two streams).
    """
    if hasattr(output, "_fields"):
        raise LyapunovPruneError(
            f"a layer returns several states by name ({', '.join(output._fields)}); this decoder is not supported"
        )
    return output if isinstance(output, torch.Tensor) else output[0]


def with_hidden(output: Any, hidden: torch.Tensor) -> Any:
    """`output` with its hidden state replaced, in the form the layer returned."""
    if isinstance(output, torch.Tensor):
        return hidden
    return [hidden, *output[1:]] if isinstance(output, list) else (hidden, *output[1:])  # GPT-1 concatenates lists


def with_input(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """The arguments of a layer, or of part of one, with another hidden state."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def residual_stream(
    structure: Structure,
    visit: Visit,
    inject: Inject | None = None,
    *,
    one_state: bool = True,
    every_layer: bool = True,
) -> AbstractContextManager[None]:
    """Call `visit(l, h_l)` for `l = 0 … L` in every forward inside the block.

    `h_0` is the input of layer 0 (after `inject`, if given, has replaced it), and `h_{l+1}` the output of layer `l`,
    before the final norm. Hooks are removed on exit, also after an exception. With `one_state`, a decoder that carries
    several states per token (not windows × tokens × width) raises LyapunovPruneError; with `every_layer`, so does one
    that skips a layer (such as Mllama without an image).
    """
    reached = -1

    def seen(boundary: int, hidden: torch.Tensor) -> None:
        nonlocal reached
        if every_layer:
            require_run(structure, max(reached, 0), boundary <= reached + 1, "give a decoder whose layers all do")
        reached = boundary
        visit(boundary, hidden)

    def checked(hidden: torch.Tensor) -> torch.Tensor:
        if one_state:
            require_one_state(structure, hidden)
        return hidden

    def first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = checked(layer_input(args, kwargs))
        if inject is not None:
            hidden = inject(hidden)
            args, kwargs = with_input(args, kwargs, hidden)
        seen(0, hidden)
        return args, kwargs

    def after(index: int) -> Callable[..., None]:
        return lambda module, args, kwargs, output: seen(index + 1, checked(hidden_of(output)))

    leaving = [(layer, after(index)) for index, layer in enumerate(structure.layers)]
    return hooked(before=[(structure.layers[0], first)], after=leaving)


def require_run(structure: Structure, layer: int, ran: bool, remedy: str) -> None:
    """Raise LyapunovPruneError, ending with `remedy`, unless `layer` `ran` in a forward of text."""
    if not ran:
        kind = type(structure.backbone).__name__
        raise LyapunovPruneError(f"layer {layer} of {kind} does not run on text alone; {remedy}")


def require_one_state(structure: Structure, hidden: torch.Tensor) -> None:
    """Raise LyapunovPruneError unless the state is windows × tokens × width."""
    if hidden.ndim != 3:
        raise LyapunovPruneError(
            f"{type(structure.backbone).__name__} carries several states a token, and the growth of an error is "
            "defined for one; rank by kl, or compress it without a profile"
        )


def skipped(structure: Structure, layers: tuple[int, ...]) -> AbstractContextManager[None]:
    """In every forward inside the block, `layers` return the hidden state they were given.

    A second state passed between layers (Zaya's routers) is returned unchanged too; its parameter is called so, while
    T5 returns its position bias where it takes the mask. What a layer leaves elsewhere for others, such as shared keys
    and values, stays: only its contribution to the residual stream is skipped.

    The layers still compute, so this is a reference for removal and no faster than the full model.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden_of(output)
        if isinstance(output, tuple):
            names = _arguments(type(module).forward)
            passed = [
                before
                if "hidden_states" in name
                and (before is None or getattr(before, "shape", None) == getattr(after, "shape", ()))
                else after
                for name, before, after in zip(names, args, output, strict=False)
            ]
            output = (*passed, *output[len(passed) :])
        return with_hidden(output, layer_input(args, kwargs))

    return hooked(after=[(structure.layers[i], hook) for i in layers])


@cache
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments of a class's forward, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]


def run_backbone(structure: Structure, inputs: torch.Tensor) -> None:
    """Run token ids or pixels through the backbone, without the head, for the hooks set on it.

    No tokens × vocabulary tensor is built.
    """
    embedding = next(structure.backbone.parameters())  # the first parameter; some backbones do not name their embedding
    inputs = inputs.to(embedding.device)
    if inputs.is_floating_point():
        structure.backbone(pixel_values=inputs)
    else:
        structure.backbone(input_ids=inputs, use_cache=False)


def run_up_to(structure: Structure, layer: nn.Module, inputs: torch.Tensor, seen: Callable[..., Any]) -> None:
    """`run_backbone` up to `layer`; `seen` is called with the arguments of a hook after that, and no more is run."""

    def stop(*given: Any) -> None:
        seen(*given)
        raise Enough

    with suppress(Enough), hooked(after=[(layer, stop)]):
        run_backbone(structure, inputs)


@torch.no_grad()
def run_through(decoder: Decoder, examples: Examples) -> None:
    """Run every item through the backbone, one at a time, for the hooks set on it."""
    for inputs in model_inputs(decoder.model, examples, 1):
        run_backbone(decoder.structure, inputs)


def final_state(structure: Structure, ids: torch.Tensor) -> torch.Tensor:
    """The state that the head reads, after the final norm: windows × tokens × width."""
    states: list[torch.Tensor] = []
    with hooked(after=[(structure.backbone, lambda module, args, kwargs, output: states.append(output[0]))]):
        run_backbone(structure, ids)
    return states[0]


@torch.no_grad()
def require_finite(structure: Structure, ids: torch.Tensor, where: str, *made: torch.Tensor | np.ndarray) -> None:
    """Raise NonFiniteError naming the first boundary where a state of `ids` is NaN or infinite.

    With `made`, which the model has computed from `ids`, nothing is run if that is finite. LyapunovPruneError is raised
    if all states are finite and the output of the final norm or `made` is not.
    """
    if made and all(map(all_finite, made)):
        return
    with residual_stream(structure, finite_at(where), one_state=False, every_layer=False):
        final = final_state(structure, ids)
    require_numbers(final, f"the output of the final norm ({where})")
    for values in made:
        require_numbers(values, f"what the model makes of its last state ({where})")


def finite_at(where: str) -> Visit:
    """For `residual_stream`: raises NonFiniteError at the first boundary where the state is NaN or infinite."""

    def visit(layer: int, hidden: torch.Tensor) -> None:
        require_finite_layers(np.array([all_finite(hidden)]), where, layer)

    return visit


def require_finite_layers(finite: np.ndarray, where: str, first: int = 1) -> None:
    """Raise NonFiniteError for the first boundary, of those from `first` on, for which `finite` is false."""
    if not finite.all():
        raise NonFiniteError(first + int(np.argmin(finite)), where)


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden state that a decoder layer was called with."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, torch.Tensor):
        raise LyapunovPruneError("a decoder layer was called without hidden states; this decoder is not supported")
    return hidden
