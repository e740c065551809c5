"""The branches of a layer, attention and MLP: found by what the layer does, and run alone.

Nothing is assumed about a family. The layer is called with the model's own arguments, and its children are told apart
by whether they hold matrices, by the order of their calls, and by the tensors passed between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import Enough, hidden_of, with_input
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import Call, hooked
from lyapunov_prune.models.modeling_compact import LowRank
from lyapunov_prune.models.plain import require_readable
from lyapunov_prune.models.projections import layer_projections
from lyapunov_prune.models.structure import Structure


@dataclass(frozen=True)
class Branch:
    """A branch of `layer`, from the input of `entry` to the output of `exit`.

    `x` is what entered it when it was found: the residual stream of that input. `parts` are the names of the children
    from its first matrix to its last; norms at its ends are not among them.
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entry: nn.Module
    exit: nn.Module
    x: torch.Tensor
    parts: tuple[str, ...]

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


def find_branches(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], matrices: dict[str, bool]
) -> tuple[Branch, ...]:
    """Attention and MLP of a layer called with `args` and `kwargs`: its first and last child with matrices.

    `matrices` comes from `matrix_children`. An MLP that consists of bare matrices in a row (OPT) begins with the first
    of them. A branch includes a norm that feeds only it, and a norm that takes only its output (Gemma 2). A layer with
    one such child has one branch. Raises LyapunovPruneError for a layer without any.
    """
    calls: list[Call] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            if isinstance(given, torch.Tensor):
                calls.append(Call(name, module, given, hidden_of(output)))

        return hook

    with hooked(after=[(child, note(name)) for name, child in layer.named_children()]):
        layer.forward(*args, **kwargs)
    places = [i for i, call in enumerate(calls) if call.path in matrices]
    if not places:
        why = "calls no child that holds a matrix"
        if any(isinstance(child, nn.ModuleList) for child in layer.children()):  # T5
            why = "keeps its parts in a list, and each adds to the state itself, so that none can be left out alone"
        raise LyapunovPruneError(f"{type(layer).__name__} {why}; take whole layers")
    first = last = len(places) - 1
    while first > 1 and matrices[calls[places[first]].path] and matrices[calls[places[first - 1]].path]:
        first -= 1
    spans = [(places[0], places[0])] if last == 0 else [(places[0], places[0]), (places[first], places[last])]
    found = []
    for start, stop in spans:
        entry, exit = _ends(calls, matrices, start, stop)
        parts = tuple(call.path for call in calls[start : stop + 1])
        found.append(Branch(layer, args, kwargs, entry.module, exit.module, entry.given.detach(), parts))
    return tuple(found)


def _ends(calls: Sequence[Call], matrices: dict[str, bool], first: int, last: int) -> tuple[Call, Call]:
    """The norm that feeds `calls[first]` and the norm that `calls[last]` feeds, or else these calls themselves."""
    norms = [c for c in calls if c.path not in matrices and not _same(c.given, c.returned)]  # dropout changes nothing
    entry = next((c for c in norms if _same(c.returned, calls[first].given)), calls[first])
    exit = next((c for c in norms if _same(c.given, calls[last].returned)), calls[last])
    return entry, exit


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share their memory, whatever their shapes."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


def matrix_children(decoder: Decoder) -> list[dict[str, bool]]:
    """For each layer: its children with matrices, and whether each is itself one matrix (or two factors of it)."""
    structure = decoder.structure
    require_readable(decoder)
    return [layer_children(structure, index) for index in range(structure.num_layers)]


def layer_children(structure: Structure, index: int) -> dict[str, bool]:
    """`matrix_children` of one layer."""
    name = f"{structure.layers_path}.{index}"
    children: dict[str, bool] = {}
    for p in layer_projections(structure.layers[index], index, name, structure.model_type, structure.config):
        child, _, rest = p.module.removeprefix(f"{name}.").partition(".")
        children[child] = not rest or isinstance(structure.layers[index].get_submodule(child), LowRank)
    return children
