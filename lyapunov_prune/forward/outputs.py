"""The parameters that make what leaves a branch: found by trying, so that nothing is known of a family."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lyapunov_prune.forward.branches import Branch
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.projections import without_numbers


@torch.no_grad()
def zero_outputs(branch: Branch) -> list[nn.Parameter] | None:
    """Set to zero, in place, as few parameters as make the branch add nothing: weight, bias, every expert.

    Going back from the branch's end, parameters are zeroed until what leaves it is zero in every component, then those
    put back that this did not need. The rest is returned; None, and all put back, where something is left that no
    parameter of a module with matrices makes: a norm with a bias, the residual stream.
    """
    tried: list[tuple[nn.Parameter, torch.Tensor]] = []
    for parameter in _outputs_first(branch):
        if not branch(branch.x).any():
            break
        tried.append((parameter, parameter.clone()))
        parameter.zero_()
    silent = not branch(branch.x).any()
    needed: list[nn.Parameter] = []
    for parameter, before in reversed(tried):
        parameter.copy_(before)
        if silent and branch(branch.x).any():
            parameter.zero_()
            needed.append(parameter)
    return needed if silent else None


def _outputs_first(branch: Branch) -> list[nn.Parameter]:
    """The parameters of the modules with matrices between entry and exit, those called last coming first.

    Experts that are modules of their own go together, called or not.
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
