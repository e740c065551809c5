"""Make a model physically smaller: attentions are gone, feed-forward blocks are merged into one matrix.

A transformers checkpoint of a known `model_type` cannot say that a layer lacks its attention. The result therefore has
a class of its own (`models.modeling_compact`), whose config says it layer by layer. This file checks no logits; the
gate (`compact_gate`) does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.forward.anatomy import Anatomy, find_anatomy, find_attentions
from lyapunov_prune.forward.logits import cache_of
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.merging.merge import Merged
from lyapunov_prune.merging.reduction import HiddenMap
from lyapunov_prune.models.compact import NO_ATTENTION, compact_class, is_compact
from lyapunov_prune.models.decoder import Decoder, takes_model
from lyapunov_prune.models.feedforward import Affine, find_feedforward
from lyapunov_prune.models.hooked import held
from lyapunov_prune.models.modeling_compact import lacks_attention, text_config
from lyapunov_prune.models.plain import PlainAny
from lyapunov_prune.models.rebuilt import built
from lyapunov_prune.models.sharing import shared_with
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.pruning.edit import Edit, edit_of, filled
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import PartsGone
from lyapunov_prune.results.arrays import each_once
from lyapunov_prune.results.history import add_step
from lyapunov_prune.results.result import MeasuredOn

_MERGED = ("linear", "affine")  # forms of a merged block, without and with a bias


@dataclass(frozen=True, eq=False)
class Cuts:
    """What is removed: `attention` lists the layers that lose their attention; `merged` gives, by layer, the map that
    replaces the feed-forward block: the matrix W (d × d) and the bias b (d,) or None of `y = W x + b`, where x is the
    input of the block. `measured_on` is the text that both were decided or fitted on.

    `remove` lists whole layers of a decoder that are removed as well. All indices count the layers before the cut.
    `hidden` gives the map τ of a merged block if it is known: `W = W_out T`, `b = W_out t + b_out`. The gate then
    compares the model with the block's own last matrix applied to τ(x), instead of with W."""

    attention: tuple[int, ...] = ()
    merged: Mapping[int, Affine] = field(default_factory=dict)
    measured_on: tuple[MeasuredOn, ...] = ()
    remove: tuple[int, ...] = ()
    hidden: Mapping[int, HiddenMap] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: PruningPlan, merged: Sequence[Merged]) -> Cuts:
        """The cuts of `plan`, which lacks parts of layers; `merged` holds the blocks that lose their activation."""
        assert isinstance(plan.gone, PartsGone)  # `require_compact`
        return cls(
            plan.gone.attention,
            {each.block.layer: (each.weight, each.bias) for each in merged},
            plan.measured_on,
            plan.remove,
            {each.block.layer: each.tau for each in merged},
        )


@takes_model
def make_compact(model: PlainAny, cuts: Cuts, *, shared: bool = False) -> PreTrainedModel:
    """A new, smaller model without what `cuts` names; `model`, plain or compact already, is untouched.

    Whole layers are removed first, as in `remove_layers`. The result is an instance of a subclass of `model`'s class:
    a layer without attention passes the state on, a merged block is one `nn.Linear`, rounded once to the dtype of the
    model. `save_pretrained` writes a folder that this package loads; transformers loads it without this package by
    `trust_remote_code=True`. Removed modules are never copied; with `shared` the parameters that stay are not copied
    either (`surgery.cut`).

    Raises LyapunovPruneError for a model without a compact class (`models.compact`), for a layer that does not exist,
    is named twice or has lost the same before, for an attention that cannot leave (`find_attentions`), for a matrix
    of another shape or with values that are not finite, when no attention of a decoder would be left, and for a model
    that is not its plain weights.
    """
    decoder = model
    kind = compact_class(model.model)
    places = cut_places(model, cuts)
    kept = [i for i in range(len(places)) if i not in cuts.remove]
    if cuts.remove:
        with held(model.model):
            plan = PruningPlan.given(model, cuts.remove)
            decoder = filled(edit_of(model, plan), model, shared=True)
        places = [places[i] for i in kept]
    structure, lost = decoder.structure, []
    for earlier, now in zip(cuts_of(decoder), places, strict=True):
        inside = tuple(f"{module}." for module in now)
        lost.append({path: form for path, form in earlier.items() if not path.startswith(inside)} | now)
    config = copy.deepcopy(decoder.model.config)
    config.__class__ = kind.config_class
    vars(config).pop("model_type", None)  # a config that was read from a file may hold that of its old class
    text_config(config).cuts, text_config(config).layers_path = lost, structure.layers_path
    new: dict[str, torch.Tensor] = {}
    for index, block in cuts.merged.items():
        layer = kept.index(index)
        path = f"{structure.layers_path}.{layer}.{merged_path(places[layer])}"
        like = next(structure.layers[layer].parameters())
        named = zip(("weight", "bias"), block, strict=True)
        new |= {f"{path}.{key}": part.detach().to(like, copy=True) for key, part in named if part is not None}
    with held(model.model):
        made = Decoder(built(kind, config), structure)
        modules = {path: path for path, _ in made.model.named_modules(remove_duplicate=False)}
        edit = Edit(made, tuple(range(len(places))), modules, {}, (), new)
        compact: Any = filled(edit, decoder, shared=shared).model
    compact._weight_conversions = []  # a compact class is saved by its own names, whatever its files were read by
    add_step(compact, "prune", cuts.measured_on, model.model)
    return compact


def cut_places(decoder: Decoder, cuts: Cuts) -> list[dict[str, str]]:
    """The replacement of each module, layer by layer, as `modeling_compact` reads it.

    Raises LyapunovPruneError for cuts that are not possible, as `make_compact`.
    """
    _require_cuts(decoder, cuts.attention, tuple(cuts.merged), cuts.remove)
    _require_merged(decoder, cuts)
    places: list[dict[str, str]] = [{} for _ in decoder.layers]
    if cuts.attention and (why := _unentered(decoder)):
        raise LyapunovPruneError(f"{why}; remove whole layers")
    found = find_anatomy(decoder, sorted({*cuts.attention, *cuts.merged}))
    for index, attention in find_attentions(decoder, {i: found[i] for i in cuts.attention}).items():
        places[index] |= attention.places
    for index, (first, *others) in block_paths(decoder, {i: found[i] for i in cuts.merged}).items():
        places[index] |= {first: _MERGED[cuts.merged[index][1] is not None], **dict.fromkeys(others, "identity")}
    return places


def block_paths(decoder: Decoder, found: Mapping[int, Anatomy]) -> dict[int, tuple[str, ...]]:
    """By layer: the modules in whose place a merged matrix stands, from the first one that runs to the last.

    They are those of the MLP branch, and where a layer has more parts than two, of its feed-forward block (BERT).
    """
    paths = {}
    for index, anatomy in found.items():
        if mlp := anatomy.parts.get("mlp"):
            paths[index] = mlp.branches[0].parts
        else:
            block = find_feedforward(decoder.structure, index)
            paths[index] = (block.block,) if block.block else (block.up.module, block.activation, block.out.module)
    return paths


def merged_path(places: Mapping[str, str]) -> str:
    """The path in a layer of the matrix of a merged block; empty if there is none."""
    return next((path for path, form in places.items() if form.startswith(_MERGED)), "")


def require_compact(decoder: Decoder, plan: PruningPlan) -> None:
    """Raise LyapunovPruneError for a plan that a compact checkpoint cannot hold, and for one that needs none."""
    if not isinstance(plan.gone, PartsGone):
        raise LyapunovPruneError(
            "a compact checkpoint is for plans that drop attentions or activations; write this one as plain"
        )
    compact_class(decoder.model)
    _require_cuts(decoder, plan.gone.attention, plan.gone.activation, plan.remove)


def _require_cuts(
    decoder: Decoder, attention: tuple[int, ...], blocks: tuple[int, ...], remove: tuple[int, ...]
) -> None:
    """Raise LyapunovPruneError unless these layers can lose these parts."""
    before = cuts_of(decoder)
    each_once("layers to remove", remove, len(before))
    each_once("layers that lose their attention", attention, len(before))
    each_once("layers whose feed-forward block is merged", blocks, len(before))
    left = [i for i, places in enumerate(before) if i not in {*attention, *remove} and not lacks_attention(places)]
    gone = [
        *(f"layer {i} is removed as a whole" for i in sorted({*attention, *blocks} & set(remove))),
        *(f"layer {i} no longer has attention" for i in attention if lacks_attention(before[i])),
        *(f"the feed-forward block of layer {i} is merged already" for i in blocks if merged_path(before[i])),
    ]
    wrong = {
        "nothing is removed; name layers that lose their attention, or whose blocks are merged": not (
            attention or blocks or remove
        ),
        f"{next(iter(gone), '')}; choose other layers": bool(gone),
        NO_ATTENTION: not left and decoder.model.can_generate(),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(why)


def cuts_of(decoder: Decoder) -> list[dict[str, str]]:
    """What each layer of the model lost in an earlier cut; nothing for a plain model."""
    return text_config(decoder.model.config).cuts if is_compact(decoder.model) else [{} for _ in decoder.layers]


@in_eval_mode
def _unentered(decoder: Decoder) -> str | None:
    """Why the cache of a decoder is not one entry for each attention, found by its number; None if it is."""
    model = decoder.model
    if not model.can_generate():
        return None
    for index in range(len(decoder.layers)):
        for name, other in shared_with(decoder.layers, index).items():
            return (
                f"layers {index} and {other} share {name}, and a block that layers share finds its cache entry by the "
                "number of the layer, not of the entry"
            )
    output = model(torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=True)
    expected = sum(not lacks_attention(places) for places in cuts_of(decoder))
    for name, cache in cache_of(model, output).items():
        entries = len(getattr(cache, "layers", ()))
        if entries not in (0, expected) or type(cache).__module__ != Cache.__module__:
            return (
                f"{type(model).__name__} keeps {name} in a {type(cache).__name__} of {entries} entries for {expected} "
                "layers, and without one entry a layer none can leave with an attention"
            )
    return None


def _require_merged(decoder: Decoder, cuts: Cuts) -> None:
    """Raise LyapunovPruneError for a merged block that is not d × d, not finite, or that a hidden map lacks."""
    width, dtype = decoder.structure.config.hidden_size, decoder.model.dtype
    wrong = [f"layer {i} has a hidden map and no merged matrix; give both" for i in cuts.hidden if i not in cuts.merged]
    for index, (W, b) in cuts.merged.items():
        given = [tuple(part.shape) for part in (W, b) if part is not None]
        if given != [(width, width), (width,)][: len(given)]:
            wrong.append(
                f"the merged block of layer {index} is {' and '.join(map(str, given))}; give a matrix {width} × "
                f"{width}, and a bias of {width} or None"
            )
    if wrong:
        raise LyapunovPruneError(wrong[0])
    for index, block in cuts.merged.items():
        for numbers in block:
            if numbers is not None:
                require_numbers(numbers.to(dtype), f"the merged block of layer {index} in {dtype}")
