"""Reads the layers of a streamed model, each just before it runs, into the memory of the layer before.

A forward reads the files once for all its windows: all go through a layer together, in pieces of the batch. The other
arguments of a layer (masks, positions) for the rows of a piece come from the model's own forward, run on a twin of the
model that shares everything with it except the layers, which compute nothing. The twin also finds what the model makes
of the last layer's output, without running any layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.outline import Outline
from lyapunov_prune.errors import LyapunovPruneError, in_short
from lyapunov_prune.forward.hooks import Enough, hidden_of, layer_input, with_input
from lyapunov_prune.models.device import require_memory
from lyapunov_prune.models.streamed import Visit
from lyapunov_prune.models.structure import Structure

TOKENS = 1024  # tokens in a layer at once, or one window; with more, fresh memory costs a tenth of the time
# Bytes per element of the states for temporaries besides a layer's input and output: three float32 numbers.
_BESIDE = 12
# Largest relative deviation of a token's state between the whole batch and pieces. Kernels round differently by shape,
# and some norms, softmax and scans of a float64 model run in float32.
_SAME = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]


class Twin:
    """Twins of the modules on the path to the layers.

    `pairs` are the modules of `model`, from the parent of the layers up to the model itself, each with its twin.
    `widths` are the lengths of the tuples that layers return; whoever runs the layers fills it.
    """

    def __init__(self, model: PreTrainedModel, structure: Structure) -> None:
        self.widths: dict[int, int] = {}
        self.pairs: list[tuple[nn.Module, nn.Module]] = []
        self._structure = structure
        self._wanted = -1  # the layer whose arguments are wanted, and these
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._leaving: torch.Tensor | None = None  # replaces the state at the last layer
        self._entering: torch.Tensor | None = None  # the state that entered the first layer in the last call
        path = structure.layers_path.split(".")
        modules = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
        twin = _bare(modules.pop())
        twin._modules = {str(i): self._stub(i, layer) for i, layer in enumerate(structure.layers)}
        while modules:
            module, inside, key = modules.pop(), twin, path[len(modules)]
            twin = _bare(module)
            twin._modules = {**module._modules, key: inside}
            self.pairs.append((module, twin))

    def arguments(
        self, index: int, twin: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of layer `index` if `twin` is called with these; the state in them is meaningless."""
        self._wanted = index
        try:
            with suppress(Enough):
                twin(*args, **kwargs)
        finally:
            self._wanted = -1
        return self._given

    @property
    def backbone(self) -> nn.Module:
        (backbone,) = [twin for module, twin in self.pairs if module is self._structure.backbone]
        return backbone

    def ended(self, twin: nn.Module, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """What `twin` returns for `ids` if `hidden` leaves the last layer, and the state that enters the first."""
        self._leaving = hidden
        try:
            output = twin(input_ids=ids, use_cache=False)
            assert self._entering is not None
            return output, self._entering
        finally:
            self._leaving = self._entering = None

    def _stub(self, index: int, layer: nn.Module) -> nn.Module:
        """A layer that returns its input state, or records its arguments and stops."""
        stub = _bare(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if index == self._wanted:
                self._given = args, kwargs
                raise Enough
            hidden, width = layer_input(args, kwargs), self.widths.get(index, 0)
            if index == 0:
                self._entering = hidden
            if self._leaving is not None and index == self._structure.num_layers - 1:
                hidden = self._leaving
            return (hidden, *[None] * (width - 1)) if width else hidden

        stub.forward = forward
        return stub


def _bare(module: nn.Module) -> Any:
    """A shallow copy of `module` without its hooks."""
    twin = copy.copy(module)
    for name in _HOOKS:
        vars(twin)[name] = type(vars(twin)[name])()
    return twin


class LayerStream:
    """Reads the layers of `model`, and runs each of its forwards through them."""

    def __init__(self, outline: Outline, model: PreTrainedModel, structure: Structure, device: str) -> None:
        self.digests = outline.identity.weights
        self.passes = 0  # how often layer 0 was read, usually once per forward
        self.splits = True  # whether a batch of many tokens is split
        self.outline, self._structure, self._device = outline, structure, device
        self._kind, self._dtype = type(model).__name__, model.dtype
        meant: dict[str, Any] = outline.model.state_dict(keep_vars=True)
        self._meant: list[dict[str, Any]] = [{} for _ in structure.layers]
        for name, tensor in meant.items():
            layer = structure.layer_of(name)
            if layer is not None:
                self._meant[layer][name.removeprefix(f"{structure.layers_path}.{layer}.")] = tensor
        self._held: int | None = None
        self._memory: dict[str, torch.Tensor] = {}  # the tensors of the last layer read, by name in the layer
        self._before: list[tuple[dict[str, Any], str, Any]] = []  # what the held tensors replaced
        self._trying = False
        self._visit: Visit | None = None
        self._call: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
        self._twin = Twin(model, structure)
        self._inner = [layer.forward for layer in structure.layers]
        for entered, twin in self._twin.pairs:
            entered.forward = self._leading(twin, entered.forward)
        for index, each in enumerate(structure.layers):
            module: Any = each
            module.forward = self._forward(index, module.forward)

    def hold(self, layer: int) -> None:
        if self._held == layer:
            return
        self.release()
        self.passes += layer == 0
        # Reading into memory that was used before is several times as fast.
        self._memory = {
            inside: memory
            for inside, memory in self._memory.items()
            if (meant := self._meant[layer].get(inside)) is not None
            and (memory.shape, memory.dtype) == (meant.shape, meant.dtype)
        }
        module, made = self._structure.layers[layer], dict[int, torch.Tensor]()
        for inside, meant in self._meant[layer].items():
            path, _, key = inside.rpartition(".")
            owner = module.get_submodule(path)
            slots: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
            if id(meant) not in made:
                name = f"{self._structure.layers_path}.{layer}.{inside}"
                memory = self._memory.get(inside)
                made[id(meant)] = read_tensor(self.outline, name, meant, self._device, memory)
                self._memory[inside] = made[id(meant)].detach()
            self._before.append((slots, key, slots[key]))
            slots[key] = made[id(meant)]
        self._held = layer

    def release(self) -> None:
        while self._before:
            slots, key, before = self._before.pop()
            slots[key] = before
        self._held = None

    def like(self, tried: LayerStream) -> None:
        """Take over what was found out about the same layers; the weights are other ones."""
        self._twin.widths, self.splits, self.digests = tried._twin.widths, tried.splits, {}

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Forwards inside the block run every layer on the whole batch and row by row, and compare the results."""
        self._trying = True
        try:
            yield
        finally:
            self._trying = False

    @contextmanager
    def visiting(self, visit: Visit) -> Iterator[None]:
        self._visit = visit
        try:
            yield
        finally:
            self._visit = None

    def run(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        self.hold(layer)
        given = self._twin.arguments(layer, self._twin.backbone, input_ids=ids, use_cache=False)
        args, kwargs = with_input(*given, hidden)
        others = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x is not hidden)
        if any(x.requires_grad for x in others):
            raise LyapunovPruneError(
                f"layer {layer} of this {self._kind} is given more than its state that weights outside of it have made "
                "(embeddings by layer), and their gradients would be lost; load it whole (without --device disk)"
            )
        return hidden_of(self._inner[layer](*args, **kwargs))

    def finish(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self._twin.ended(self._twin.backbone, ids, hidden)[0][0]

    def ends(self, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, entering = self._twin.ended(self._twin.pairs[-1][1], ids, hidden)
        return entering, output.logits

    def _forward(self, index: int, inner: Any) -> Any:
        """The replacement of `inner`, the layer's own forward."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.hold(index)
            hidden = layer_input(args, kwargs)
            at_once = max(1, TOKENS // hidden.shape[1])
            split = self.splits and len(hidden) > at_once and not self._trying

            def run(state: torch.Tensor) -> Iterator[torch.Tensor]:
                if split:
                    yield from (hidden_of(output) for _, output in self._pieces(index, inner, state, at_once))
                else:
                    again, others = with_input(args, kwargs, state)
                    yield hidden_of(inner(*again, **others))

            if self._visit is not None:
                self._visit(index, hidden, run)
            if split:
                return self._in_pieces(index, inner, hidden, at_once)
            output = inner(*args, **kwargs)
            if not isinstance(output, torch.Tensor):
                self._twin.widths[index] = len(output)
            if self._trying:
                self._try(index, inner, hidden, hidden_of(output))
            return output

        return forward

    def _in_pieces(self, index: int, inner: Any, hidden: torch.Tensor, at_once: int) -> Any:
        states, others = torch.empty_like(hidden), list[Any]()
        for rows, output in self._pieces(index, inner, hidden, at_once):
            states[rows] = hidden_of(output)
            if not isinstance(output, torch.Tensor):
                others.append(output[1:])
        if not others:
            return states
        joined = (torch.cat(of) if isinstance(of[0], torch.Tensor) else of[0] for of in zip(*others, strict=True))
        return (states, *joined)

    def _pieces(self, index: int, inner: Any, hidden: torch.Tensor, at_once: int) -> Iterator[tuple[slice, Any]]:
        for start in range(0, len(hidden), at_once):
            rows = slice(start, start + at_once)
            args, kwargs = self._arguments(index, rows, len(hidden))
            args, kwargs = with_input(args, kwargs, hidden[rows])
            yield rows, inner(*args, **kwargs)

    def _arguments(self, index: int, rows: slice, windows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of layer `index` in a forward of these `rows` alone; the state in them is meaningless."""
        assert self._call is not None
        twin, args, kwargs = self._call
        ids = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if len(ids) != 1 or len(ids[0]) != windows or ids[0].is_floating_point() or kwargs.get("use_cache", True):
            raise LyapunovPruneError(
                f"a streamed {self._kind} is called with token ids alone and use_cache=False where its batch is split"
            )
        args = tuple(x[rows] if isinstance(x, torch.Tensor) else x for x in args)
        kwargs = {name: x[rows] if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
        return self._twin.arguments(index, twin, *args, **kwargs)

    def _try(self, index: int, inner: Any, hidden: torch.Tensor, whole: torch.Tensor) -> None:
        reason = "rows of the batch depend on each other"
        try:
            apart = hidden_of(self._in_pieces(index, inner, hidden, 1))
            same = torch.allclose(_units(apart, whole), _units(whole, whole), 0, _SAME[self._dtype], equal_nan=True)
        except Exception as error:  # a layer fails in its own way without the others
            same, reason = False, in_short(error, 120)
        if not same:
            raise LyapunovPruneError(
                f"{self._kind} ({self._structure.model_type}) cannot be streamed: layer {index} needs more than the "
                f"state of the one before it ({reason}); take it in memory"
            )

    def _leading(self, twin: nn.Module, inner: Any) -> Any:
        """The replacement of `inner`, the forward of a module that contains the layers.

        After the outermost forward no layer is held, unless it was held before.
        """

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._call is not None:  # called within another such module
                return inner(*args, **kwargs)
            self._require_memory((*args, *kwargs.values()))
            self._call, before = (twin, args, kwargs), self._held
            try:
                return inner(*args, **kwargs)
            finally:  # hooks, even with always_call, do not run after Ctrl-C
                self._call = None
                if before is None or self._held != before:
                    self.release()

        return forward

    def _require_memory(self, given: Sequence[Any]) -> None:
        tokens = max((x.numel() for x in given if isinstance(x, torch.Tensor)), default=0)
        width = getattr(self._structure.config, "hidden_size", 0)
        needed = tokens * width * (2 * self._dtype.itemsize + _BESIDE)
        require_memory(needed, self._device, f"the states of {tokens:,} tokens, disturbed copies among them")


def read_tensor(
    outline: Outline, name: str, meant: torch.Tensor, device: str, memory: torch.Tensor | None = None
) -> torch.Tensor:
    """Read the tensor `name` as loading would, with dtype and type of `meant`, into `memory` or a new tensor."""
    tensor = torch.empty(meant.shape, dtype=meant.dtype, device=device) if memory is None else memory
    outline.fill(tensor, name)
    return nn.Parameter(tensor, requires_grad=False) if isinstance(meant, nn.Parameter) else tensor


def _units(states: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """`states` divided by the norms of the tokens `of`."""
    return states.double() / torch.linalg.vector_norm(of.double(), dim=-1, keepdim=True).clamp_min(1e-30)
