"""The parameters that produce a branch's output, found by zeroing them, so that nothing is assumed about a family."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lyapunov_prune.forward.branches import Branch
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.projections import without_numbers


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
