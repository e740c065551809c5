"""Attention and MLP of a layer: which branch is which, and silencing a branch with a hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.branches import Branch, find_branches, layer_children, tried
from lyapunov_prune.forward.hooks import hidden_of, layer_input, with_hidden
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import in_eval_mode

Kind = Literal["attention", "mlp"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_MOVED = 1e-3


@dataclass(frozen=True)
class Sublayers:
    """The branches of a layer by kind, in call order. `parallel`: both read the layer's input."""

    branches: dict[str, Branch]
    parallel: bool
    lack: str  # why a kind is missing


@in_eval_mode
def find_sublayers(decoder: Decoder, layers: Sequence[int]) -> dict[int, Sublayers]:
    """Find attention and MLP of `layers` in a forward of a few random tokens, or of an image.

    Of two branches the first is attention, unless only the second mixes tokens. A single branch is attention if it
    mixes tokens, otherwise the MLP. A layer with more than two branches is given neither, because no rule says which to
    leave out. The layers of `decoder` are plain matrices (`models.plain.require_readable`).
    """
    sublayers: dict[int, Sublayers] = {}

    def see(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sublayers[index] = _sublayers(layer, args, kwargs, layer_children(decoder.structure, index))

    tried(decoder, layers, see)
    return {i: sublayers.get(i, Sublayers({}, False, "does not run on text alone")) for i in layers}


def require_some(decoder: Decoder, sublayers: Mapping[int, Sublayers]) -> None:
    """Raise LyapunovPruneError, with the reason of the first layer, if no layer has an attention or MLP of its own."""
    if not any(found.branches for found in sublayers.values()):
        first, found = next(iter(sublayers.items()))
        raise LyapunovPruneError(
            f"layer {first} of {type(decoder.model).__name__} {found.lack}, and no attention and MLP that could be "
            "told apart; take whole layers"
        )


def between_branches(
    decoder: Decoder, sublayers: Mapping[int, Sublayers], but: str
) -> dict[int, tuple[str, nn.Module]]:
    """For every layer with two branches: the kind that runs first, and the module where the stream enters the second.

    Raises LyapunovPruneError, with a message ending in `but`, for parallel branches, which have no state between them.
    """
    for layer, found in sublayers.items():
        if found.parallel:
            raise LyapunovPruneError(
                f"{type(decoder.model).__name__} runs attention and MLP of layer {layer} side by side, with no state "
                f"between them{but}"
            )
    both = {layer: list(found.branches.items()) for layer, found in sublayers.items() if len(found.branches) == 2}
    return {layer: (first, branch.entry) for layer, ((first, _), (_, branch)) in both.items()}


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
    mixes = [mixes_tokens(branch) for branch in branches]
    if len(branches) == 1:
        return Sublayers({KINDS[not mixes[0]]: branches[0]}, False, f"has one branch, {blocks[0]}")
    kinds = KINDS[::-1] if mixes == [False, True] else KINDS
    stream = layer_input(args, kwargs)
    parallel = all(branch.x.data_ptr() == stream.data_ptr() for branch in branches)
    return Sublayers(dict(zip(kinds, branches, strict=True)), parallel, "")


def mixes_tokens(branch: Branch) -> bool:
    """Whether the branch's output at the last token depends on its input at other tokens."""
    other = branch.x.flip(-1)  # a gated convolution does not see a change of sign
    other[..., -1, :] = branch.x[..., -1, :]
    before, after = branch(branch.x)[..., -1, :], branch(other)[..., -1, :]
    return bool((after - before).norm() > _MOVED * before.norm())


def silent(*branches: Branch) -> AbstractContextManager[None]:
    """In every forward inside the block, these branches add nothing to the residual stream; they compute as before."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return with_hidden(output, torch.zeros_like(hidden_of(output)))

    return hooked(after=[(branch.exit, hook) for branch in branches])
