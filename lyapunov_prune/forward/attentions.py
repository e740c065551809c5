"""The attention of a layer and what stands in its place when it leaves, found by running the layer.

No family is named. The attention is the part that mixes tokens: a state-space mixer or a convolution counts too. A
stand-in is right if the layer computes with it what it computes when the attention adds nothing, and if the whole model
does, since a later layer may read more of an attention than the state: its keys, or the tokens that it chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError, in_short
from lyapunov_prune.forward.branches import Branch, calls_of, tried
from lyapunov_prune.forward.hooks import hidden_of, layer_input, require_run, with_input
from lyapunov_prune.forward.logits import SAME_LIMIT, deviation, sample_inputs, uncached_logits
from lyapunov_prune.forward.sublayers import mixes_tokens, silent
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import Call
from lyapunov_prune.models.modeling_compact import NONE, stand_in
from lyapunov_prune.models.structure import in_eval_mode

_OTHERS = "choose other layers, or remove it whole"
_FAILS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Attention:
    """What mixes tokens in a layer: its branches, and the form of every module that is replaced when they leave.

    A layer whose mixers run side by side (Falcon H1) has several branches. `places` maps paths in the layer to forms of
    `models.modeling_compact`: a mixer's module returns zeros, and a norm or matrix that serves it alone becomes an
    identity.
    """

    branches: tuple[Branch, ...]
    places: dict[str, str]


@in_eval_mode
def find_attentions(decoder: Decoder, layers: Sequence[int]) -> dict[int, Attention]:
    """The attention of each of `layers`.

    Raises LyapunovPruneError for a layer in which nothing mixes tokens, for one whose mixer does more than add to the
    state, and if a later layer reads more than the state from one of these attentions.
    """
    found: dict[int, Attention] = {}

    def see(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[index] = _attention(index, layer, args, kwargs)

    tried(decoder, layers, see)
    for layer in layers:
        require_run(decoder.structure, layer, layer in found, _OTHERS)
    if found:
        _require_unread(decoder, found)
    return found


def silenced_attentions(attentions: Mapping[int, Attention]) -> AbstractContextManager[None]:
    """In every forward inside the block, these attentions add nothing to the state; they compute as before."""
    return silent(*(branch for attention in attentions.values() for branch in attention.branches))


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


def fed_alone(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> list[nn.Module]:
    """The modules of `layer` that take the output of the module `path` one after the other: a norm, or none."""
    calls = calls_of(layer, args, kwargs)
    return [call.module for call in _chain(calls, next(call for call in calls if call.path == path))[1:]]


def _attention(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention:
    calls = calls_of(layer, args, kwargs)
    inside = ""
    while True:
        mixers = [call for call in calls if _is_child(call, inside) and _mixes(layer, args, kwargs, call)]
        mixers = [call for call in mixers if not any(call in _chain(calls, other)[1:] for other in mixers)]
        found = _replaceable(layer, args, kwargs, calls, mixers) if mixers else None
        if found is not None:
            return found
        if len(mixers) != 1:
            names = ", ".join(call.path for call in mixers)
            why = f"no module of layer {index} mixes the tokens that it is given, so none is an attention of its own"
            if mixers:
                why = f"{names} of layer {index} mix tokens, and return more than what is added to the state"
            elif inside:
                why = (
                    f"the {type(layer.get_submodule(inside)).__name__} of layer {index} returns more than what is "
                    "added to the state (the state itself, or a bias), and no module in it mixes tokens and could "
                    "leave alone"
                )
            raise LyapunovPruneError(f"{why}; {_OTHERS}")
        inside = mixers[0].path


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
    return any(True for _ in call.module.children()) and any(p.ndim > 1 for p in call.module.parameters())


def _mixes(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> bool:
    return call.given.ndim == 3 and mixes_tokens(Branch(layer, args, kwargs, call.module, call.module, call.given, ()))


def _chain(calls: Sequence[Call], first: Call) -> list[Call]:
    """`first`, and one after the other the matrices and norms that take what it returned and no other tensor."""
    chain = [first]
    for call in calls[calls.index(first) + 1 :]:
        leaf = not any(True for _ in call.module.children()) or not any(p.ndim > 1 for p in call.module.parameters())
        if leaf and call.alone and chain[-1].feeds(call) and not call.feeds(call):
            chain.append(call)
    return chain


def _replaceable(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], calls: Sequence[Call], mixers: Sequence[Call]
) -> Attention | None:
    """The attention that consists of `mixers`, if stand-ins for them compute what the layer does when they add nothing.

    None if nothing of the layer's input is left when their output is zero: then they hold the residual addition.
    """
    chains = [_chain(calls, mixer) for mixer in mixers]
    feeding = {call.path for call in calls for mixer in mixers if call is not mixer and call.feeds(mixer)}
    after = {call.path for chain in chains for call in chain[1:]}
    branches = tuple(
        Branch(layer, args, kwargs, chain[0].module, chain[-1].module, chain[0].given, (chain[0].path,))
        for chain in chains
    )
    other = with_input(args, kwargs, -layer_input(args, kwargs))
    with silent(*branches):
        wanted = hidden_of(layer.forward(*args, **kwargs))
        if torch.equal(wanted, hidden_of(layer.forward(*other[0], **other[1]))):
            return None
    for norms in (feeding | after, after, feeding, set()):
        places = {mixer.path: _form(mixer.output) for mixer in mixers} | dict.fromkeys(sorted(norms), "identity")
        with standing_in(layer, replaced(layer, places, wanted.shape[-1])):
            try:
                found = hidden_of(layer.forward(*args, **kwargs))
            except _FAILS:
                continue
        if torch.equal(found, wanted):
            return Attention(branches, places)
    return None


def _require_unread(decoder: Decoder, attentions: Mapping[int, Attention]) -> None:
    """Raise LyapunovPruneError if the model without these attentions is not the one in which they add nothing."""
    inputs = sample_inputs(decoder, None)[0]
    layers, width = decoder.layers, decoder.structure.config.hidden_size
    with silenced_attentions(attentions):
        wanted = uncached_logits(decoder.model, inputs)
    with ExitStack() as stack:
        for index, attention in attentions.items():
            stack.enter_context(standing_in(layers[index], replaced(layers[index], attention.places, width)))
        try:
            found = uncached_logits(decoder.model, inputs)
            same = torch.equal(found.nan_to_num(), wanted.nan_to_num())  # a broken model is refused by who measures it
            error = 0.0 if same else deviation(found, wanted)
            how = f"logits deviate by {error:.2g}"
        except _FAILS as failure:
            error, how = float("inf"), in_short(failure, 100)
    if not error <= SAME_LIMIT[decoder.model.dtype]:
        raise LyapunovPruneError(
            f"a later layer reads more than the state from the attention of layer {', '.join(map(str, attentions))}, "
            f"such as its keys or the tokens that it chose ({how}); {_OTHERS}"
        )
