"""Where a layer can take a linear map of its contribution to the residual stream, within its own parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.branches import Branch, calls_of, tried, zero_outputs
from lyapunov_prune.forward.hooks import hidden_of, require_run, with_hidden
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import Call, hooked, in_float32
from lyapunov_prune.models.sharing import shared_with
from lyapunov_prune.models.structure import in_eval_mode

_SAME = 1e-3  # relative tolerance of a layer in float32


@dataclass(frozen=True)
class Part:
    """A parameter of a place: `name` inside the layer, the axis of its outputs, and `offset`.

    `offset` is 1 for norms that multiply by 1 + weight.
    """

    name: str
    axis: int
    offset: float = 0.0


@dataclass(frozen=True)
class Place:
    """The output of the module `module` of `layer` is m, and the layer adds `scale · m` to the stream.

    Multiplying each of `parts` by `I + E` on its output side gives `(I + E) m`. With `channels` E must be diagonal,
    because a norm lies between the last matrix and the stream. `shifts` names the parameter that may take `+ b`, empty
    if there is none.
    """

    layer: int
    module: str
    scale: float
    channels: bool
    parts: tuple[Part, ...]
    shifts: str


@in_eval_mode
def find_place(decoder: Decoder, layer: int) -> Place:
    """The last place in `layer` that can take a map, verified by running the layer on random tokens.

    Does not depend on the family. Going back from the end of the layer, a module is a candidate if its output moves the
    layer's output by the same multiple everywhere; its parameters are multiplied by a random `I + E` and must give `(I
    + E) m`. A full map is preferred to a diagonal one. Works on a float32 copy of the layer: the model is not changed.

    Raises LyapunovPruneError, with the reason, for a layer without such a place.
    """
    structure = decoder.structure
    found: list[_Layer] = []

    def see(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(_Layer(copy.deepcopy(module).float(), *in_float32((args, kwargs))))

    tried(decoder, (layer,), see)
    require_run(structure, layer, bool(found), "keep another layer before the gap")
    shared = shared_with(structure.layers, layer)
    kinds: list[Place] = []
    for path, scale in found[0].additive():
        place = found[0].place(layer, path, scale)
        if place is None or any(part.name in shared for part in place.parts):
            continue
        if not place.channels:
            return place
        kinds.append(place)
    if kinds:
        return kinds[0]
    raise LyapunovPruneError(
        f"no matrix of layer {layer} ({type(structure.layers[layer]).__name__}) can take the map, because none adds "
        "to the stream by itself; remove other layers, or leave out mending"
    )


@dataclass(frozen=True, eq=False)
class _Layer:
    """A copy of a layer with the arguments of its call."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def calls(self) -> list[Call]:
        return calls_of(self.layer, self.args, self.kwargs)

    def run(self, path: str = "", change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """The layer's output when the output of the module `path` is changed."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            return with_hidden(output, change(hidden_of(output))) if change else output

        with hooked(after=[(self.layer.get_submodule(path), hook)] if path else []):
            return hidden_of(self.layer.forward(*self.args, **self.kwargs))

    def additive(self) -> Iterator[tuple[str, float]]:
        """Modules in reverse order of completion, each with the factor by which it moves the layer's output."""
        whole = self.run()
        paths = [call.path for call in self.calls]
        for call in reversed(self.calls):
            path, hidden = call.path, call.returned
            alone = hidden.numel() == whole.numel() and paths.count(path) == 1
            if not alone or not any(True for _ in call.module.parameters()):
                continue
            moved = hidden.std() * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden)
            after = self.run(path, lambda m, moved=moved: m + moved) - whole  # type: ignore[misc]
            moved = moved.reshape(after.shape)
            scale = float((after * moved).sum() / moved.square().sum())
            if scale and _error(after, scale * moved) <= _SAME:
                yield path, scale

    def place(self, layer: int, path: str, scale: float) -> Place | None:
        """The place at the output of `path`, for a full or a diagonal map, if it is one."""
        branch = self._branch(path)
        m = branch(branch.x)
        width = m.shape[-1]
        for channels, candidates in ((False, self._matrices(path, branch, width)), (True, self._norm(path))):
            E = (_random(width) if channels else _random(width, width)).to(m.device)
            wanted = m * (1 + E) if channels else m + m @ E.T
            # Take the nearest, not the first within tolerance: for a norm with large weights w and 1 + w hardly differ.
            nearest, least = None, _SAME
            for parts in candidates:
                with self._put_back(path):
                    for part in parts:
                        p = self.layer.get_parameter(part.name)
                        p.copy_(multiplied(p, part, E))
                    error = _error(branch(branch.x), wanted)
                if error <= least:
                    nearest, least = parts, error
            if nearest is not None:
                return Place(layer, path, scale, channels, nearest, _shift(nearest))
        return None

    def _matrices(self, path: str, branch: Branch, width: int) -> Iterator[tuple[Part, ...]]:
        """The parameters that produce the output of `path`, once for every choice of their output axes."""
        names = {id(p): name for name, p in self.layer.named_parameters()}
        with self._put_back(path):
            needed = zero_outputs(branch) or []
        axes = [[axis for axis, size in enumerate(p.shape) if size == width] for p in needed]
        for chosen in product(*axes) if needed else ():
            yield tuple(Part(names[id(p)], axis) for p, axis in zip(needed, chosen, strict=True))

    def _norm(self, path: str) -> Iterator[tuple[Part, ...]]:
        """Weight and bias of the norm `path`, which multiplies by the weight or by 1 + weight."""
        own = dict(self.layer.get_submodule(path).named_parameters(recurse=False))
        if own and all(p.ndim == 1 for p in own.values()):
            for offset in (0.0, 1.0):
                yield tuple(Part(f"{path}.{name}", 0, offset if name == "weight" else 0.0) for name in own)

    @contextmanager
    def _put_back(self, path: str) -> Iterator[None]:
        """Restore the parameters of the module `path` at the end of the block."""
        parameters = list(self.layer.get_submodule(path).parameters())
        before = [p.clone() for p in parameters]
        yield
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)

    def _branch(self, path: str) -> Branch:
        """Run the module `path` alone, on its input in the layer."""
        call = next(call for call in self.calls if call.path == path)
        return Branch(self.layer, self.args, self.kwargs, call.module, call.module, call.given, ())


def multiplied(p: torch.Tensor, part: Part, E: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
    """`(I + E) p` over the output axis, for a matrix or a diagonal E, `+ shift`; in the dtype of E."""
    wide = p.to(E) + part.offset
    if E.ndim == 1:
        changed = (wide.movedim(part.axis, -1) * (1 + E)).movedim(-1, part.axis)
    else:
        changed = wide + torch.tensordot(E, wide, dims=([1], [part.axis])).movedim(0, part.axis)
    changed = changed - part.offset
    return changed if shift is None else changed + shift


def _shift(parts: tuple[Part, ...]) -> str:
    """The only bias among the parts; several experts would each add the whole shift."""
    biases = [part.name for part in parts if part.name.rpartition(".")[2] == "bias"]
    return biases[0] if len(biases) == 1 and len(parts) == 2 else ""


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)) / shape[-1] ** 0.5


def _error(one: torch.Tensor, other: torch.Tensor) -> float:
    """`‖one − other‖ / ‖other‖`; infinite if `other` is zero or not finite and `one` differs."""
    if torch.equal(one, other):
        return 0.0
    error = float((one - other).norm() / other.norm())
    return error if math.isfinite(error) else math.inf
