"""The feed-forward block of a layer: its matrices, its activation, and whether it is gated; verified by running it.

A plain block is `y = W₂ σ(W₁ x + b₁) + b₂`, a gated one `y = W_d (σ(W_g x + b_g) ⊙ (W_u x + b_u)) + b_d`. Nothing is
assumed about a family: the matrices are those whose names say that they lead into or out of an MLP (`roles`), fused
ones are split by `projections` or in halves, and the rest is observed while the block runs on random inputs. The block
rebuilt from these parts must give the block's own output; otherwise it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
from torch import nn
from torch.nn.functional import linear

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.linalg import lift, require_numbers
from lyapunov_prune.models.hooked import Call, calls_noted
from lyapunov_prune.models.projections import Projection, layer_projections
from lyapunov_prune.models.roles import role
from lyapunov_prune.models.sharing import shared_with
from lyapunov_prune.models.structure import Structure, in_eval_mode
from lyapunov_prune.models.units import inside, layer_units

_TOKENS = 8
_OTHERS = "choose other layers"
_ATTENTION = f"drop its attention (prune --what attention), or {_OTHERS}"

# A matrix (output × input) and the bias added to its product.
Affine = tuple[torch.Tensor, torch.Tensor | None]


def lifted(affine: Affine) -> Affine:
    """The same in float64."""
    W, b = affine
    return lift(W), None if b is None else lift(b)


@dataclass(frozen=True, eq=False)
class BlockParts:
    """A feed-forward block as tensors, views of the model's own; `gate` is None in a plain block."""

    gate: Affine | None
    up: Affine
    out: Affine
    activation: nn.Module

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """`h(x)`, the input of the last matrix: `σ(W₁ x + b₁)`, or `σ(W_g x + b_g) ⊙ (W_u x + b_u)`."""
        if self.gate is None:
            return self.activation(linear(x, *self.up))
        return self.activation(linear(x, *self.gate)) * linear(x, *self.up)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output for inputs (…, d)."""
        return linear(self.hidden(x), *self.out)

    @property
    def numbers(self) -> int:
        """Number of weights and biases in the block."""
        pairs = [self.up, self.out] + ([] if self.gate is None else [self.gate])
        return sum(t.numel() for pair in pairs for t in pair if t is not None)


@dataclass(frozen=True)
class FeedForward:
    """Where a layer keeps its feed-forward block; all paths are relative to the layer.

    `up` is the matrix into the hidden units. Its output goes through the activation in a plain block; in a gated one,
    the output of `gate` does, and is multiplied by that of `up`. It also holds for a copy of the model.
    """

    layer: int
    block: str  # the module with only this block; empty if its parts are direct children of the layer (OPT)
    gate: Projection | None
    up: Projection
    out: Projection
    activation: str  # path of the module for σ

    @property
    def gated(self) -> bool:
        return self.gate is not None

    def parts(self, layer: nn.Module) -> BlockParts:
        """The tensors of the block in `layer`."""
        gate, up, out = (
            None if p is None else (p.weight(layer), p.bias(layer)) for p in (self.gate, self.up, self.out)
        )
        assert up is not None
        assert out is not None
        return BlockParts(gate, up, out, layer.get_submodule(self.activation))


def find_feedforward(structure: Structure, layer: int) -> FeedForward:
    """The feed-forward block of a layer, in any transformer whose layers take only a state.

    Raises LyapunovPruneError, with the reason, for a layer with experts, several blocks, or none recognisable by name,
    with a norm between the matrices, matrices shared with another layer, an activation that is not a module, or a block
    that does more than its matrices and activation.
    """
    return _read(structure.layers, layer, *_matrices(structure, layer))


@in_eval_mode
def _read(layers: nn.ModuleList, index: int, block: str, into: Sequence[Projection], out: Projection) -> FeedForward:
    layer, where = layers[index], f"layer {index}"
    _require_own(layers, index, [*into, out])
    calls, given, returned = _run(layer, where, block, into, out)
    require_numbers(returned, f"outputs of the feed-forward block of {where} for random inputs")
    activation = _activation(where, calls, {p.module for p in (*into, out)})
    outputs = {c.path: c.returned for c in calls}
    through = [p for p in into if torch.equal(outputs[p.module][..., p.start : p.stop], activation.given)]
    if len(through) != 1:
        _unknown(where, f"its {type(activation.module).__name__} is given something else than a matrix's output")
    gate = through[0] if len(into) == 2 else None
    if gate and not block:
        _unknown(where, "a gate whose matrices lie bare in the layer")
    up = next(p for p in into if p is not gate)
    found = FeedForward(index, block, gate, up, out, activation.path)
    if not _is_same(found.parts(layer)(given), returned, up):
        _unknown(where, f"{out.name} gives another output than its matrices and its activation")
    return found


def _matrices(structure: Structure, layer: int) -> tuple[str, list[Projection], Projection]:
    """The module of the block, the one or two matrices into the hidden units, and the one out of them, in the layer."""
    below = f"{structure.layers_path}.{layer}."

    def own(p: Projection) -> Projection:
        return p.called(partial(inside, below=below), layer)

    matrices = tuple(layer_projections(structure, layer))
    known = [own(p) for p in matrices if p.expert is not None or role(p.component) in ("mlp-in", "mlp-out")]
    for p in known:
        if p.expert is not None or any(part.isdigit() for part in p.module.split(".")):
            _refuse(
                f"layer {layer} has experts or several feed-forward blocks ({p.name}, …): a router chooses among them "
                f"for every token, so no single matrix can replace them; {_ATTENTION}"
            )
    if not known:
        _refuse(
            f"layer {layer} has no matrix of a feed-forward block (state spaces have none) with a known name; "
            f"{_OTHERS}, or name it in models/roles.py"
        )
    units = layer_units(structure, matrices)
    if len(units) != 1:
        shapes = (f"{p.name} {tuple(p.weight(structure.layers[layer]).shape)}" for p in known)
        _unknown(f"layer {layer}", f"its matrices are {', '.join(shapes)}")
    (unit,) = units
    into = list(map(own, unit.into))
    if unit.fused:  # which half is which, a run shows
        (both,) = into
        middle = both.start + unit.width
        into = [replace(both, stop=middle), replace(both, start=middle)]
    return inside(unit.block, below), into, own(unit.out)


def _refuse(why: str) -> NoReturn:
    raise LyapunovPruneError(why)


def _unknown(where: str, what: str) -> NoReturn:
    _refuse(f"{where} has a feed-forward block of an unknown shape ({what}); {_OTHERS}")


def _require_own(layers: nn.ModuleList, index: int, projections: Sequence[Projection]) -> None:
    """Raise LyapunovPruneError if another layer shares one of these matrices, since merging would change it there."""
    shared = shared_with(layers, index)
    for p in projections:
        if (other := shared.get(f"{p.module}.{p.parameter}")) is not None:
            _refuse(
                f"{p.name} of layer {index} is also a matrix of layer {other}; shared matrices are not merged: "
                f"{_OTHERS}"
            )


def _run(
    layer: nn.Module, where: str, block: str, into: Sequence[Projection], out: Projection
) -> tuple[list[Call], torch.Tensor, torch.Tensor]:
    """Run the block; returns the calls from the first matrix to the last, the block's input and its output.

    A block that is a module is run on random states. If its parts are direct children of the layer, the layer is run,
    and the block's input and output are those of its first and last matrix.
    """
    weight = into[0].weight(layer)
    x = torch.randn(1, _TOKENS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    runs = layer.get_submodule(block)
    leaves = [(path, module) for path, module in layer.named_modules() if not any(module.children())]
    what = f"the feed-forward block of {where}, in {type(runs).__name__}, does not run on a state alone"
    failures = AttributeError, IndexError, RuntimeError, TypeError, ValueError
    with reported(what, _OTHERS, *failures), calls_noted(leaves) as calls:
        output = runs(x)
    paths = [c.path for c in calls]
    modules = {p.module for p in (*into, out)}
    first = next((i for i, path in enumerate(paths) if path in modules), 0)
    last = paths.index(out.module) if out.module in paths else 0
    once = all(paths.count(path) == 1 for path in {*modules, *paths[first:last]})
    if not once or modules & {*paths[last + 1 :]}:
        _unknown(
            where,
            f"{type(runs).__name__} does not call each of its matrices once, the last at the end, and each "
            "module between them once",
        )
    if not block:
        return calls[first : last + 1], calls[first].given, calls[last].returned
    return calls[first : last + 1], x, output if isinstance(output, torch.Tensor) else output[0]


def _activation(where: str, calls: Sequence[Call], matrices: set[str]) -> Call:
    """The one elementwise module between the matrices that changes its input (dropout does not)."""
    between = [c for c in calls if c.path not in matrices and not torch.equal(c.given, c.returned)]
    odd = next((c for c in between if not _elementwise(c)), between[-1] if len(between) > 1 else None)
    if odd is not None:
        _refuse(
            f"{where} has a {type(odd.module).__name__} ({odd.path}) between the matrices of its feed-forward block, "
            f"where only one activation can be removed; {_OTHERS}"
        )
    if not between:
        _refuse(
            f"the activation of {where} is a function that the code of its block calls, and no module, so that nothing "
            f"can stand in its place; {_ATTENTION}"
        )
    return between[0]


def _elementwise(call: Call) -> bool:
    """Whether no entry of the output depends on other entries of the input."""
    given = call.given.clone(memory_format=torch.contiguous_format)  # same layout, so that both round alike
    before = call.module(given)
    given[..., ::2] += 1
    after = call.module(given)
    return after.shape == given.shape and torch.equal(after[..., 1::2], before[..., 1::2])


def _is_same(rebuilt: torch.Tensor, own: torch.Tensor, up: Projection) -> bool:
    """Whether the rebuilt block gives the block's own output, up to rounding.

    The tolerance covers one rounding in the model's dtype, and one per summand in float32: a fused matrix may be summed
    in another order than its part.
    """
    sums = torch.promote_types(own.dtype, torch.float32)
    limit = torch.finfo(own.dtype).eps + 4 * math.sqrt(up.stop - up.start + own.shape[-1]) * torch.finfo(sums).eps
    error = float((rebuilt.double() - own.double()).norm()) if rebuilt.numel() == own.numel() else math.inf
    return error <= limit * float(own.double().norm())
