"""Change one layer, or only its attention or MLP, inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.anatomy import find_attentions, silent, standing_in
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.forward.replacement import exchanged, replaced
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import find_structure, identify, require_versions

What = Literal["layer", "attention", "mlp"]
WHAT: tuple[What, ...] = get_args(What)
# (layer, part) -> a context in which it is changed; None if the layer has no such part.
Changes = Callable[[int, str], AbstractContextManager[None] | None]


def dropped_layers(reading: Reading) -> Changes:
    """A changed layer returns its input; a changed branch adds nothing."""
    anatomy = reading.anatomy

    def change(layer: int, part: str) -> AbstractContextManager[None] | None:
        if part == "layer":
            return reading.prefix.bypassed((layer,))
        found = anatomy[layer].parts.get(part)
        return None if found is None else silent(found)

    return change


def compressed_layers(reading: Reading, compressed: PreTrainedModel) -> Changes:
    """A changed layer or branch has the matrices of `compressed`, and no bias if `compressed` has set it to zero.

    A zero matrix with a zero bias comes from a branch that was left out (`forward.branches.zero_outputs`). Raises
    LyapunovPruneError if `compressed` has other shapes, or differs in anything else.
    """
    model, structure = reading.model, reading.structure
    if identify(compressed).architecture != identify(model).architecture:
        raise LyapunovPruneError(
            "the compressed model has other layers than the dense one; give one of the same shapes"
        )
    projections = find_projections(reading.decoder)
    matrices = {f"{p.module}.{p.parameter}" for p in projections}
    theirs = dict(compressed.named_parameters())
    gone: dict[str, list[str]] = {}  # zeroed biases, by module
    for name, parameter in model.named_parameters():
        inside = name.startswith(f"{structure.layers_path}.") and name not in matrices
        if not inside or torch.equal(parameter, theirs[name].to(parameter)):
            continue
        matrix = name[:-4] + "weight" if name.endswith(".bias") else name.removesuffix("_bias")
        if matrix not in matrices or theirs[matrix].any() or theirs[name].any():
            raise LyapunovPruneError(f"the compressed model has another {name}; give one that changed matrices alone")
        module, _, key = name.rpartition(".")
        gone.setdefault(module, []).append(key)
    parts: dict[tuple[int, str], list[Projection]] = {}
    for layer, anatomy in reading.anatomy.items():
        here, base = [p for p in projections if p.layer == layer], f"{structure.layers_path}.{layer}."
        parts[layer, "layer"] = here
        for kind, part in anatomy.parts.items():
            own = tuple(f"{base}{path}." for branch in part.branches for path in branch.parts)
            parts[layer, kind] = [p for p in here if f"{p.module}.".startswith(own)]

    def change(layer: int, part: str) -> AbstractContextManager[None] | None:
        chosen = parts.get((layer, part))
        return None if not chosen else changed(chosen)

    @contextmanager
    def changed(chosen: Sequence[Projection]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(replaced(model, {p: p.weight(compressed) for p in chosen}))
            for name in {p.module for p in chosen} & gone.keys():
                module = model.get_submodule(name)
                for key in gone[name]:
                    bias = module.get_parameter(key)
                    zeros = nn.Parameter(torch.zeros_like(bias), bias.requires_grad)
                    stack.enter_context(exchanged(module, key, zeros))
            yield

    return change


def compact_layers(reading: Reading, compact: PreTrainedModel) -> Changes:
    """A changed layer or branch is that of `compact`, which was cut from this model or a similar one.

    Raises LyapunovPruneError for another family or number of layers.
    """
    structure, other = reading.structure, find_structure(compact)
    require_versions(structure, other, as_deep=True)
    anatomy = reading.anatomy
    attentions = find_attentions(
        reading.decoder, {i: found for i, found in anatomy.items() if "attention" in found.parts}
    )

    def change(layer: int, part: str) -> AbstractContextManager[None] | None:
        mine, theirs = structure.layers[layer], other.layers[layer]
        if part == "layer":
            return standing_in(mine, dict(theirs.named_children()))
        found = anatomy[layer].parts.get(part)
        if found is None:
            return None
        names = attentions[layer].places if part == "attention" else found.branches[0].parts
        return standing_in(mine, {name: theirs.get_submodule(name) for name in names})

    return change
