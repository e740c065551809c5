"""The handle of a model: the model and its structure, looked up once when it enters the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.arguments import Parsed, checked
from lyapunov_prune.models.dispatched import require_numbers
from lyapunov_prune.models.families import Family
from lyapunov_prune.models.hooked import held
from lyapunov_prune.models.mixtures import Mixtures, find_mixtures
from lyapunov_prune.models.pictures import looks_at_images
from lyapunov_prune.models.projections import layer_projections
from lyapunov_prune.models.quantised import is_packed
from lyapunov_prune.models.streamed import Stream, require_not_streamed, stream_of
from lyapunov_prune.models.structure import (
    Structure,
    find_layers,
    find_structure,
    identify,
    in_eval_mode,
    model_name,
    settle,
)
from lyapunov_prune.models.units import Units, layer_units
from lyapunov_prune.results.result import ModelIdentity

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Decoder:
    """A decoder-only language model and its structure, made by `load` or `wrap`.

    It is valid as long as `model` keeps its modules; weights may change in place. `tokenizer` is the one that the model
    was loaded with, or None if `wrap` was given none.
    """

    model: PreTrainedModel
    structure: Structure
    tokenizer: Any = None

    def __repr__(self) -> str:
        return (
            f"{model_name(self.model)} ({self.structure.model_type}): {self.structure.num_layers} layers, "
            f"{self.model.num_parameters():,} parameters, {self.model.dtype} on {self.model.device}"
        )

    @property
    def layers(self) -> nn.ModuleList:
        return self.structure.layers

    @property
    def family(self) -> Family:
        """What the family needs beyond the general rules."""
        return self.structure.family

    @property
    def stream(self) -> Stream | None:
        """The reader that reads layers from files one at a time; None if all weights are in memory."""
        return stream_of(self.model)

    @property
    def packed(self) -> bool:
        """Whether its weights are quantised integers that only the kernels of their library can read."""
        return is_packed(self.model)

    @property
    def wrapped(self) -> bool:
        """Whether it is the text part of a larger model."""
        return is_wrapped(self.model)

    @cached_property
    def units(self) -> Units:
        """The hidden channels of every layer's feed-forward blocks and experts (`models.units.layer_units`)."""
        return tuple(layer_units(self.structure, layer_projections(self.structure, i)) for i in range(len(self.layers)))

    @cached_property
    def mixtures(self) -> Mixtures:
        """The experts of every layer; raises LyapunovPruneError as `models.mixtures.find_mixtures`."""
        return find_mixtures(self.structure)

    @property
    def identity(self) -> ModelIdentity:
        """Hashes of its settings and weights as they are now; every weight is read at each call."""
        return identify(self.model)


# What a public function accepts as a model.
Model = PreTrainedModel | Decoder


@checked
def wrap(model: Model, tokenizer: PreTrainedTokenizerBase | None = None) -> Decoder:
    """The handle of `model`, which all functions of this package accept in its place; a handle is returned as it is.

    Packed weights are put into the form in which they are measured.

    Raises LyapunovPruneError for an encoder, an encoder-decoder, a model without a list of layers, and for weights on
    `meta`, where accelerate leaves those that it offloads.
    """
    if isinstance(model, Decoder):
        return model
    with held(model):
        if stream_of(model) is None:
            require_numbers(model)
            settle(model)
        return Decoder(model, find_structure(model), tokenizer)


def wrap_any(model: Model) -> Decoder:
    """`wrap`, which also takes image classifiers: they have layers but no language head."""
    if isinstance(model, Decoder) or not looks_at_images(model):
        return wrap(model)
    require_numbers(model)
    return Decoder(model, find_layers(model))


def in_memory(model: Model, handle: Callable[[Model], Decoder] = wrap) -> Decoder:
    """The handle of a model with all weights in memory. Raises LyapunovPruneError for others, and as `handle` does."""
    require_not_streamed(model_of(model))
    return handle(model)


def identity_of(model: Model | ModelIdentity) -> ModelIdentity:
    """The identity of a model with all weights in memory; an identity is returned as it is."""
    return model if isinstance(model, ModelIdentity) else in_memory(model, wrap_any).identity


# Annotations of public functions: the caller gives a `Model`, the function receives the handle, or the identity.
Streamable = Annotated[Decoder, Parsed(Model, wrap)]
InMemory = Annotated[Decoder, Parsed(Model, in_memory)]
InMemoryAny = Annotated[Decoder, Parsed(Model, partial(in_memory, handle=wrap_any))]  # and image classifiers
Identified = Annotated[ModelIdentity, Parsed(Model | ModelIdentity, identity_of)]


def takes_model(function: Callable[Concatenate[Decoder, P], T]) -> Callable[Concatenate[Model, P], T]:
    """`checked` for a function whose first argument is a model; tells type checkers that a plain model is accepted."""
    handed: Any = checked(function)
    return handed


def takes_models(
    function: Callable[Concatenate[Decoder, Decoder, P], T],
) -> Callable[Concatenate[Model, Model, P], T]:
    """`takes_model` for a function of two models."""
    handed: Any = checked(function)
    return handed


def runs_model(function: Callable[Concatenate[Decoder, P], T]) -> Callable[Concatenate[Model, P], T]:
    """`takes_model` for a function that runs the model: in eval mode and without gradients (`in_eval_mode`)."""
    return takes_model(in_eval_mode(function))


def runs_models(
    function: Callable[Concatenate[Decoder, Decoder, P], T],
) -> Callable[Concatenate[Model, Model, P], T]:
    """`runs_model` for a function of two models."""
    return takes_models(in_eval_mode(function))


def takes_identity(
    function: Callable[Concatenate[C, ModelIdentity, P], T],
) -> Callable[Concatenate[C, Model | ModelIdentity, P], T]:
    """`takes_model` for a class method that is given a model or its identity, and receives the identity."""
    handed: Any = checked(function)
    return handed


def is_wrapped(model: PreTrainedModel) -> bool:
    """Whether the decoder is the text part of a larger model."""
    return model.config.get_text_config(decoder=True) is not model.config


def model_of(model: Model) -> PreTrainedModel:
    """The model itself, taken out of its handle if it is one."""
    return model.model if isinstance(model, Decoder) else model
