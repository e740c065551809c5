"""Attention or MLP of a layer left out of a plain checkpoint: the output projection of its branch becomes zero.

A plain transformers checkpoint cannot say that a layer lacks its attention or its MLP. It can say the same in
numbers: where the branch's output projection is zero, the branch adds nothing to the residual stream. The zeros
are stored and multiplied like any weight, so this shows what a sublayer is worth and saves no time or memory. In a
compact checkpoint (`compact.py`) attentions are gone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.branches import Branch
from lyapunov_prune.forward.sublayers import named_branches
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import in_eval_mode


@in_eval_mode
@torch.no_grad()
def zero_sublayers(model: PreTrainedModel, attention: tuple[int, ...], mlp: tuple[int, ...]) -> None:
    """Set the output projections of these branches of `model` to zero, in place: weight, bias, every expert.

    Which they are is found by trying: going back from the branch's end, parameters are zeroed until what leaves
    it is zero in every component, then those put back that this did not need. Raises LyapunovPruneError for a
    layer without such a branch, for one whose end adds something of its own (a norm with a bias), and when
    another layer uses the same matrix.
    """
    if not (attention or mlp):
        return
    for index, kind, branch in named_branches(model, attention, mlp):
        tried: list[tuple[nn.Parameter, torch.Tensor]] = []
        for parameter in _outputs_first(branch):
            if not branch(branch.x).any():
                break
            tried.append((parameter, parameter.clone()))
            parameter.zero_()
        if branch(branch.x).any():
            raise LyapunovPruneError(
                f"the {kind} of layer {index} ends in a {type(branch.exit).__name__} that adds something of its own, a "
                "bias or the residual stream, which zeroing the output projection leaves in; remove the whole layer"
            )
        for parameter, before in reversed(tried):
            parameter.copy_(before)
            if branch(branch.x).any():
                parameter.zero_()
                _require_alone(model, parameter, index, kind)


def _outputs_first(branch: Branch) -> list[nn.Parameter]:
    """The parameters of the modules with matrices between entry and exit, those called last coming first.

    Experts that are modules of their own go together, called or not.
    """
    called: list[str] = []
    names = {id(module): _role(name) for name, module in branch.layer.named_modules()}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(p.ndim >= 2 for p in module.parameters(recurse=False)):
            called.append(names[id(module)])

    begins = (branch.entry, lambda module, args, kwargs: called.clear())
    with hooked(before=[begins, *((module, note) for module in branch.layer.modules())]):
        branch(branch.x)
    modules: dict[str, list[nn.Module]] = {}
    for name, module in branch.layer.named_modules():
        modules.setdefault(_role(name), []).append(module)
    roles = dict.fromkeys(reversed(called))
    return [p for role in roles for module in modules[role] for p in reversed(list(module.parameters(recurse=False)))]


def _role(path: str) -> str:
    return ".".join(part for part in path.split(".") if not part.isdigit())


def _require_alone(model: PreTrainedModel, parameter: nn.Parameter, index: int, kind: str) -> None:
    users = [name for name, p in model.named_parameters(remove_duplicate=False) if p.data_ptr() == parameter.data_ptr()]
    if len(users) > 1:
        raise LyapunovPruneError(
            f"the {kind} of layer {index} ends in {users[0]}, which is also {users[1]}; remove the whole layer"
        )
