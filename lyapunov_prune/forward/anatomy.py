"""What a layer is made of, found by running it: its attention and its MLP, and where each enters and leaves the stream.

No family is named. The attention is the part that mixes tokens: a state-space mixer or a convolution counts too, and so
do mixers side by side (Falcon H1). The MLP is the one other part with matrices.

What stands in the place of an attention is right if the layer computes with it what it computes when the attention adds
nothing, and if the whole model does, since a later layer may read more of an attention than the state: its keys, or the
tokens that it chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, get_args

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError, in_short
from lyapunov_prune.forward.branches import Branch, calls_of, tried
from lyapunov_prune.forward.hooks import hidden_of, layer_input, with_hidden, with_input
from lyapunov_prune.forward.logits import SAME_LIMIT, deviation, sample_inputs, uncached_logits
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import Call, hooked
from lyapunov_prune.models.modeling_compact import NONE, stand_in
from lyapunov_prune.models.projections import layer_projections
from lyapunov_prune.models.structure import Structure, in_eval_mode

Kind = Literal["attention", "mlp"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_MOVED = 1e-3
_OTHERS = "choose other layers, or remove it whole"
_FAILS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Sublayer:
    """What a layer adds to the residual stream at one place: one branch, or several side by side.

    `places` maps paths in the layer to the form (`models.modeling_compact`) of what stands there when the part leaves:
    a mixer's module returns zeros, and a norm or matrix that serves it alone becomes an identity. Empty for an MLP.
    """

    branches: tuple[Branch, ...]
    places: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Anatomy:
    """The parts of a layer by kind, in the order of their calls. `parallel`: both read the layer's input.

    `lack` says why the parts are not all that the layer adds to the stream, `stays` why its attention cannot leave;
    both are empty if it is not so.
    """

    parts: Mapping[str, Sublayer]
    parallel: bool
    lack: str
    stays: str

    @property
    def whole(self) -> Mapping[str, Sublayer]:
        """The parts, if they are all that the layer adds to the stream, and none if not."""
        return {} if self.lack else self.parts


@in_eval_mode
def find_anatomy(decoder: Decoder, layers: Sequence[int]) -> dict[int, Anatomy]:
    """The anatomy of each of `layers`, found in a forward of a few random tokens, or of an image.

    The layers are plain matrices (`models.plain.require_readable`).
    """
    found: dict[int, Anatomy] = {}

    def see(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[index] = anatomy_of(decoder.structure, index, args, kwargs)

    if layers:
        tried(decoder, layers, see)
    idle, kind = "does not run on text alone", type(decoder.structure.backbone).__name__
    return {i: found.get(i, Anatomy({}, False, idle, f"layer {i} of {kind} {idle}")) for i in layers}


@in_eval_mode
def find_attentions(decoder: Decoder, found: Mapping[int, Anatomy]) -> dict[int, Sublayer]:
    """The attentions of these layers, which can leave together.

    Raises LyapunovPruneError for a layer in which nothing mixes tokens, for one whose mixer does more than add to the
    state, and if a later layer reads more than the state from one of these attentions.
    """
    if why := next((each.stays for each in found.values() if each.stays), None):
        raise LyapunovPruneError(f"{why}; {_OTHERS}")
    attentions = {i: each.parts["attention"] for i, each in found.items()}
    if attentions:
        _require_unread(decoder, attentions)
    return attentions


def require_some(decoder: Decoder, layers: Mapping[int, Anatomy]) -> None:
    """Raise LyapunovPruneError, with the reason of the first layer, if no layer consists of an attention and an MLP."""
    if not any(found.whole for found in layers.values()):
        first, found = next(iter(layers.items()))
        raise LyapunovPruneError(
            f"layer {first} of {type(decoder.model).__name__} {found.lack}, and no attention and MLP that could be "
            "told apart; take whole layers"
        )


def between_branches(decoder: Decoder, layers: Mapping[int, Anatomy], but: str) -> dict[int, tuple[str, nn.Module]]:
    """For every layer of two parts: the kind that runs first, and the module where the stream enters the second.

    Raises LyapunovPruneError, with a message ending in `but`, for parallel parts, which have no state between them.
    """
    for layer, found in layers.items():
        if found.parallel:
            raise LyapunovPruneError(
                f"{type(decoder.model).__name__} runs attention and MLP of layer {layer} side by side, with no state "
                f"between them{but}"
            )
    both = {layer: list(found.whole.items()) for layer, found in layers.items() if len(found.whole) == 2}
    return {layer: (first, part.branches[0].entry) for layer, ((first, _), (_, part)) in both.items()}


def silent(*parts: Sublayer) -> AbstractContextManager[None]:
    """In every forward inside the block, these parts add nothing to the residual stream; they compute as before."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return with_hidden(output, torch.zeros_like(hidden_of(output)))

    return hooked(after=[(branch.exit, hook) for part in parts for branch in part.branches])


def replaced(layer: nn.Module, places: Mapping[str, str], width: int) -> dict[str, nn.Module]:
    """New modules of the forms `places`, which can stand in `layer`; `width` is the number of entries of a state."""
    return {path: stand_in(form, layer.get_submodule(path), width) for path, form in places.items()}


@contextmanager
def standing_in(layer: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within the block, `layer` has `modules` at these paths."""
    before = {path: layer.get_submodule(path) for path in modules}
    try:
        for path, module in modules.items():
            layer.set_submodule(path, module)
        yield
    finally:
        for path, module in before.items():
            layer.set_submodule(path, module)


def anatomy_of(structure: Structure, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Anatomy:
    """The anatomy of a layer that is called with `args` and `kwargs`.

    A layer in which nothing mixes tokens and two parts follow each other has its attention first. A layer with more
    parts has no MLP, because no rule says which it is.
    """
    layer = structure.layers[index]
    run = _Run(index, layer, args, kwargs, calls_of(layer, args, kwargs))
    stream, matrices = layer_input(args, kwargs), _children(structure, index)
    attention, mixers, stays = run.attention()
    held = {call.path.partition(".")[0] for call in mixers}
    others = [call for call in run.calls if call.path in matrices.keys() - held]
    rest = matrices.keys() - held - {call.path for call in others}  # what text does not run, and lists
    # Bare matrices in a row are one block, as OPT's MLP.
    blocks = [list(row) for _, row in groupby(others, lambda call: "" if matrices[call.path] else call.path)]
    names = [*sorted(held), *(" + ".join(call.path for call in block) for block in blocks), *sorted(rest)]
    if not mixers and len(blocks) == 2:
        mixers = blocks.pop(0)
        attention = Sublayer((run.branch(*mixers),))
    parts = {"attention": attention} if attention else {}
    if len(blocks) == 1 and not rest and bool(attention) == bool(mixers):
        mlp = Sublayer((run.branch(*blocks[0]),))
        first = attention is None or run.calls.index(blocks[0][0]) < run.calls.index(mixers[0])
        if run.without(mlp) is not None:
            parts = {"mlp": mlp, **parts} if first else {**parts, "mlp": mlp}
    lack = ""
    if stream.ndim != 3:
        lack = "carries several states a token"
    elif not parts or len(parts) < len(names) - max(0, len(held) - 1):  # several mixers are one attention
        lack = f"is more than one attention and one MLP that add to its state ({', '.join(names)})"
    parallel = len(parts) == 2 and all(p.branches[0].x.data_ptr() == stream.data_ptr() for p in parts.values())
    return Anatomy(parts, parallel, lack, stays)


def _children(structure: Structure, index: int) -> dict[str, bool]:
    """The children of a layer with matrices, each with whether it is itself one matrix."""
    name = f"{structure.layers_path}.{index}"
    children: dict[str, bool] = {}
    for p in layer_projections(structure, index):
        child, _, rest = p.module.removeprefix(f"{name}.").partition(".")
        children[child] = not rest
    return children


@dataclass(frozen=True, eq=False)
class _Run:
    """A layer with the arguments of its call, and the calls of all modules in it."""

    index: int
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: list[Call]

    def output(self) -> torch.Tensor:
        return hidden_of(self.layer.forward(*self.args, **self.kwargs))

    def branch(self, first: Call, *others: Call) -> Branch:
        """From the norm that feeds `first`, or `first` itself, to the last call, or what takes only its output."""
        entry = next((c for c in self.calls if not _holds_matrix(c) and not c.feeds(c) and c.feeds(first)), first)
        last = [first, *others][-1]
        chain = self.chain(last)
        span = self.calls[self.calls.index(first) : self.calls.index(last)] if others else []
        parts = [call.path for call in span if "." not in call.path]
        parts += [call.path for call in chain if call is last or _holds_matrix(call)]
        norms = tuple(call.module for call in chain[1:])
        return Branch(
            self.layer,
            self.args,
            self.kwargs,
            entry.module,
            chain[-1].module,
            entry.given.detach(),
            tuple(parts),
            norms,
        )

    def chain(self, first: Call) -> list[Call]:
        """`first`, and one after the other the matrices and norms that take what it returned and no other tensor."""
        chain = [first]
        for call in self.calls[self.calls.index(first) + 1 :]:
            leaf = not any(True for _ in call.module.children()) or not _holds_matrix(call)
            if leaf and call.alone and chain[-1].feeds(call) and not call.feeds(call):
                chain.append(call)
        return chain

    def attention(self) -> tuple[Sublayer | None, list[Call], str]:
        """The attention, the calls of the layer's own blocks that mix tokens first, and why it cannot leave."""
        inside, outer = "", list[Call]()
        while True:
            every = [call for call in self.calls if _is_child(call, inside) and self.mixes(call)]
            mixers = self.beside(every)
            outer = outer or mixers
            if mixers and (found := self.replaceable(mixers)):
                others = ", ".join(call.path for call in every if call not in mixers)
                stays = (
                    f"{others} of layer {self.index} mix tokens too, and read the cache that leaves with its attention"
                )
                return found, outer, stays if others else ""
            if len(mixers) != 1:
                break
            inside = mixers[0].path
        stays = f"no module of layer {self.index} mixes the tokens that it is given, so none is an attention of its own"
        if mixers:
            names = ", ".join(call.path for call in mixers)
            stays = f"{names} of layer {self.index} mix tokens, and return more than what is added to the state"
        elif inside:
            stays = (
                f"the {type(self.layer.get_submodule(inside)).__name__} of layer {self.index} returns more than what "
                "is added to the state (the state itself, or a bias), and no module in it mixes tokens and could leave "
                "alone"
            )
        return None, outer, stays

    def mixes(self, call: Call) -> bool:
        """Whether the output of `call` at the last token depends on its input at other tokens."""
        if call.given.ndim != 3:
            return False
        branch = Branch(self.layer, self.args, self.kwargs, call.module, call.module, call.given, ())
        other = call.given.flip(-1)  # a gated convolution does not see a change of sign
        other[..., -1, :] = call.given[..., -1, :]
        before, after = branch(call.given)[..., -1, :], branch(other)[..., -1, :]
        return bool((after - before).norm() > _MOVED * before.norm())

    def beside(self, mixers: Sequence[Call]) -> list[Call]:
        """The first of `mixers`, and those that are given the same if it adds nothing."""
        with silent(Sublayer(tuple(map(self.branch, mixers[:1])))):
            given = {call.path: call.given for call in calls_of(self.layer, self.args, self.kwargs)}
        return [call for call in mixers if torch.equal(given[call.path], call.given)]

    def without(self, part: Sublayer) -> torch.Tensor | None:
        """The layer's output when `part` adds nothing; None if nothing of its input is left: `part` holds the sum."""
        args, kwargs = with_input(self.args, self.kwargs, -layer_input(self.args, self.kwargs))
        with silent(part):
            output = self.output()
            return None if torch.equal(output, hidden_of(self.layer.forward(*args, **kwargs))) else output

    def replaceable(self, mixers: Sequence[Call]) -> Sublayer | None:
        """The attention of `mixers`; None if no stand-ins compute what the layer does when they add nothing."""
        part = Sublayer(tuple(map(self.branch, mixers)))
        wanted = self.without(part)
        if wanted is None:
            return None
        feeding = {call.path for call in self.calls for m in mixers if call is not m and call.feeds(m)}
        after = {call.path for mixer in mixers for call in self.chain(mixer)[1:]}
        for norms in (feeding | after, after, feeding, set()):
            places = {mixer.path: _form(mixer.output) for mixer in mixers} | dict.fromkeys(sorted(norms), "identity")
            with standing_in(self.layer, replaced(self.layer, places, wanted.shape[-1])):
                try:
                    found = self.output()
                except _FAILS:
                    continue
            if _same(found, wanted):
                return Sublayer(part.branches, places)
        return None


def _form(output: Any) -> str:
    """The form of what returns zeros in place of `output`."""
    if isinstance(output, torch.Tensor):
        return f"{NONE} 0"
    kind = " list" if isinstance(output, list) else ""
    return NONE if len(output) == 2 and not kind else f"{NONE} {len(output)}{kind}"


def _is_child(call: Call, inside: str) -> bool:
    """Whether the call is of a block with matrices directly in the module `inside`, or in a list there."""
    if call.path.rstrip("0123456789").rstrip(".").rpartition(".")[0] != inside or call.path == inside:
        return False
    return any(True for _ in call.module.children()) and _holds_matrix(call)


def _holds_matrix(call: Call) -> bool:
    return any(p.ndim > 1 for p in call.module.parameters())


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.nan_to_num(), wanted.nan_to_num())  # a broken model is refused by who measures it


def _require_unread(decoder: Decoder, attentions: Mapping[int, Sublayer]) -> None:
    """Raise LyapunovPruneError if the model without these attentions is not the one in which they add nothing."""
    inputs = sample_inputs(decoder, None)[0]
    layers, width = decoder.layers, decoder.structure.config.hidden_size
    with silent(*attentions.values()):
        wanted = uncached_logits(decoder.model, inputs)
    with ExitStack() as stack:
        for index, attention in attentions.items():
            stack.enter_context(standing_in(layers[index], replaced(layers[index], attention.places, width)))
        try:
            found = uncached_logits(decoder.model, inputs)
            error = 0.0 if _same(found, wanted) else deviation(found, wanted)
            how = f"logits deviate by {error:.2g}"
        except _FAILS as failure:
            error, how = float("inf"), in_short(failure, 100)
    if not error <= SAME_LIMIT[decoder.model.dtype]:
        raise LyapunovPruneError(
            f"a later layer reads more than the state from the attention of layer {', '.join(map(str, attentions))}, "
            f"such as its keys or the tokens that it chose ({how}); {_OTHERS}"
        )
