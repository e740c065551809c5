"""A branch of a layer run alone, a layer tried on random tokens, and the parameters that produce a branch's output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lyapunov_prune.forward.hooks import Enough, hidden_of, run_backbone, with_input
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import Call, calls_noted, hooked
from lyapunov_prune.models.projections import without_numbers

_TOKENS = 8


@dataclass(frozen=True)
class Branch:
    """A branch of `layer`, from the input of `entry` to the output of `exit`.

    `x` is what entered it when it was found: the residual stream of that input. `parts` are the names of the modules
    from its first matrix to its last; norms at its ends are not among them. `norms` follow the last of these.
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entry: nn.Module
    exit: nn.Module
    x: torch.Tensor
    parts: tuple[str, ...]
    norms: tuple[nn.Module, ...] = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The branch's output for the input `x`."""
        outputs: list[torch.Tensor] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_input(args, kwargs, x)

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            outputs.append(hidden_of(output))
            raise Enough

        with suppress(Enough), hooked(before=[(self.entry, enter)], after=[(self.exit, leave)]):
            self.layer.forward(*self.args, **self.kwargs)
        return outputs[0]


def tried(decoder: Decoder, layers: Iterable[int], see: Callable[..., None]) -> None:
    """Run a few random tokens, or an image; `see(index, layer, args, kwargs)` is called after each of `layers`.

    The weights of a streamed layer are in memory only then.
    """
    inputs = sample_inputs(decoder, None)[0][:1]

    def note(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        see(index, layer, args, kwargs)

    with hooked(after=[(decoder.layers[i], partial(note, i)) for i in layers]):
        run_backbone(decoder.structure, inputs if inputs.is_floating_point() else inputs[:, :_TOKENS])


def calls_of(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """Run the layer; returns the calls of all modules in it (`models.hooked.calls_noted`)."""
    with calls_noted([each for each in layer.named_modules() if each[0]]) as calls:
        layer.forward(*args, **kwargs)
    return calls


@torch.no_grad()
def zero_outputs(branch: Branch) -> list[nn.Parameter] | None:
    """Zero as few parameters as possible, so that the branch adds nothing: weights, biases, all experts.

    Zeroed parameters get new memory, because another model may share the old one. Starting from the branch's end,
    parameters are zeroed until its output is zero everywhere; those that were not needed are then restored. Returns the
    zeroed ones. Returns None, with all restored, if no parameter of a module with matrices produces the rest of the
    output, as with a norm's bias or the residual stream.
    """
    tried: list[tuple[nn.Parameter, torch.Tensor]] = []
    for parameter in _outputs_first(branch):
        if not branch(branch.x).any():
            break
        tried.append((parameter, parameter.data))
        parameter.data = torch.zeros_like(parameter)
    silent = not branch(branch.x).any()
    needed: list[nn.Parameter] = []
    for parameter, before in reversed(tried):
        zeros, parameter.data = parameter.data, before
        if silent and branch(branch.x).any():
            parameter.data = zeros
            needed.append(parameter)
    return needed if silent else None


def _outputs_first(branch: Branch) -> list[nn.Parameter]:
    """The parameters of the modules with matrices between entry and exit, last called first.

    Experts in separate modules are taken together, called or not.
    """
    called: list[str] = []
    names = {id(module): without_numbers(name) for name, module in branch.layer.named_modules()}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(p.ndim >= 2 for p in module.parameters(recurse=False)):
            called.append(names[id(module)])

    begins = (branch.entry, lambda module, args, kwargs: called.clear())
    with hooked(before=[begins, *((module, note) for module in branch.layer.modules())]):
        branch(branch.x)
    modules: dict[str, list[nn.Module]] = {}
    for name, module in branch.layer.named_modules():
        modules.setdefault(without_numbers(name), []).append(module)
    roles = dict.fromkeys(reversed(called))
    return [p for role in roles for module in modules[role] for p in reversed(list(module.parameters(recurse=False)))]
