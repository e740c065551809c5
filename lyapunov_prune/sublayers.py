"""Attention or MLP of a layer left out: by a hook, and in the weights.

A transformers checkpoint cannot say that a layer lacks its attention or its MLP. It can say the same in
numbers: where the branch's output projection is zero, the branch adds nothing to the residual stream. The zeros
are stored and multiplied like any weight, so this shows what a sublayer is worth and saves no time or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.branches import Branch, find_branches, matrix_children
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import find_structure, in_eval_mode
from lyapunov_prune.tracing import hidden_of, layer_input, run_backbone, with_hidden

KINDS = ("attention", "mlp")
_TOKENS = 8
_MOVED = 1e-3


@dataclass(frozen=True)
class Sublayers:
    """The branches of a layer by kind, in the order of their calls. `parallel`: both read the layer's input."""

    branches: dict[str, Branch]
    parallel: bool
    lack: str  # why a kind is missing


@in_eval_mode
@torch.no_grad()
def find_sublayers(model: PreTrainedModel, layers: Sequence[int]) -> dict[int, Sublayers]:
    """Attention and MLP of `layers`, found in a forward of a few random tokens.

    Of two branches the first is attention, unless only the second looks at other tokens; a layer with one has
    an attention if that one does, else an MLP. A layer of more than two has neither: which of them would be left
    out is not for a rule to say. Raises LyapunovPruneError for weights that are not in memory as plain matrices.
    """
    structure = find_structure(model)
    matrices = matrix_children(model, structure)
    found: dict[int, Sublayers] = {}

    def note(index: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            found[index] = _sublayers(layer, args, kwargs, matrices[index])

        return hook

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(structure.config.vocab_size, (1, _TOKENS), generator=generator)
    handles = [structure.layers[i].register_forward_hook(note(i), with_kwargs=True) for i in layers]
    try:
        run_backbone(structure, ids)
    finally:
        for handle in handles:
            handle.remove()
    return {i: found.get(i, Sublayers({}, False, "does not run on text alone")) for i in layers}


def _sublayers(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], matrices: dict[str, bool]) -> Sublayers:
    if layer_input(args, kwargs).ndim != 3:
        return Sublayers({}, False, "carries several states a token")
    blocks = [name for name, bare in matrices.items() if not bare]
    blocks += [" + ".join(row)] if (row := [name for name, bare in matrices.items() if bare]) else []
    if len(blocks) not in (1, 2):
        return Sublayers(
            {}, False, f"has {len(blocks)} parts with matrices ({', '.join(blocks)})" if blocks else "has no matrices"
        )
    branches = find_branches(layer, args, kwargs, matrices)
    mixes = [_mixes(branch) for branch in branches]
    if len(branches) == 1:
        return Sublayers({KINDS[not mixes[0]]: branches[0]}, False, f"has one branch, {blocks[0]}")
    kinds = KINDS[::-1] if mixes == [False, True] else KINDS
    stream = layer_input(args, kwargs)
    parallel = all(branch.x.data_ptr() == stream.data_ptr() for branch in branches)
    return Sublayers(dict(zip(kinds, branches, strict=True)), parallel, "")


def _mixes(branch: Branch) -> bool:
    """Whether what leaves the branch at the last token depends on what entered it at others."""
    other = -branch.x
    other[..., -1, :] = branch.x[..., -1, :]
    before, after = branch(branch.x)[..., -1, :], branch(other)[..., -1, :]
    return bool((after - before).norm() > _MOVED * before.norm())


def _branches(
    model: PreTrainedModel, attention: tuple[int, ...], mlp: tuple[int, ...]
) -> Iterator[tuple[int, str, Branch]]:
    """The branches to leave out; raises LyapunovPruneError for a layer that lacks one."""
    found = find_sublayers(model, sorted({*attention, *mlp}))
    for kind, layers in zip(KINDS, (attention, mlp), strict=True):
        for i in layers:
            if kind not in found[i].branches:
                raise LyapunovPruneError(
                    f"layer {i} {found[i].lack}, and no {kind} to leave out; choose other layers, or remove it whole"
                )
            yield i, kind, found[i].branches[kind]


@contextmanager
def silenced(model: PreTrainedModel, attention: tuple[int, ...], mlp: tuple[int, ...]) -> Iterator[None]:
    """Every forward inside the block adds nothing to the residual stream where these branches end.

    The branches still compute: a reference for `zero_sublayers`, and no faster than the full model.
    """

    with ExitStack() as stack:
        for _, _, branch in _branches(model, attention, mlp) if attention or mlp else ():
            stack.enter_context(silent(branch))
        yield


@contextmanager
def silent(branch: Branch) -> Iterator[None]:
    """As `silenced`, for one branch."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return with_hidden(output, torch.zeros_like(hidden_of(output)))

    handle = branch.exit.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


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
    for index, kind, branch in _branches(model, attention, mlp):
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

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if any(p.ndim >= 2 for p in module.parameters(recurse=False)):
            called.append(names[id(module)])

    handles = [branch.entry.register_forward_pre_hook(lambda module, args: called.clear())]
    handles += [module.register_forward_pre_hook(note) for module in branch.layer.modules()]
    try:
        branch(branch.x)
    finally:
        for handle in handles:
            handle.remove()
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
