"""Whether a model consists of plain weights only: no adapters, no packed or offloaded weights, no other inputs.

Removal copies weights and saves them, and compression reads their matrices. Models for which that would be wrong are
refused with one line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lyapunov_prune.arguments import Parsed
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder, Model, in_memory, model_of, wrap, wrap_any
from lyapunov_prune.models.projections import Projection, structure_projections
from lyapunov_prune.models.quantised import is_packed, quantisation
from lyapunov_prune.models.reader import UNPACK
from lyapunov_prune.models.structure import Structure

Weights = Literal["unquantised", "unpacked", "unadapted"]


def plain(model: Model, handle: Callable[[Model], Decoder] = in_memory) -> Decoder:
    """The handle of a model with plain weights only, which can be copied and saved.

    Raises LyapunovPruneError for adapters, for weights that are quantised, parametrised or on `meta`, and as `handle`
    does: for those that are streamed.
    """
    require_weights(model_of(model), "unadapted", "unquantised")
    decoder = handle(model)
    require_parameters(decoder.structure)
    return decoder


# Annotations for models that can be copied and saved: decoders, or image classifiers or streamed ones too.
Plain = Annotated[Decoder, Parsed(Model, plain)]
PlainAny = Annotated[Decoder, Parsed(Model, partial(plain, handle=partial(in_memory, handle=wrap_any)))]
PlainStreamable = Annotated[Decoder, Parsed(Model, partial(plain, handle=wrap))]


def require_weights(model: nn.Module, *kinds: Weights) -> None:
    """Raise LyapunovPruneError unless the weights of `model` are of all these kinds.

    They are "unquantised" if the checkpoint was not quantised, even if it was unpacked on loading: a checkpoint made of
    it would be dense, but only as accurate as the integers were. They are "unpacked" if they are no integers, which
    must not be taken for a matrix, and "unadapted" if no adapters are attached.
    """
    method = quantisation(getattr(model, "config", None))
    named = model.named_modules() if "unadapted" in kinds else ()
    adapted = [name for name, m in named if hasattr(m, "base_layer") and hasattr(m, "lora_A")]
    where = f" to {len(adapted)} matrices ({adapted[0]}, …)" if adapted else ""
    faults: dict[Weights, tuple[object, str]] = {
        "unadapted": (
            adapted or hasattr(model, "peft_config"),
            f"adapters are attached{where}, which a plain checkpoint cannot hold; merge them first "
            "(merge_and_unload of peft)",
        ),
        "unquantised": (method, f"the weights are {method}; {UNPACK}"),
        "unpacked": (
            method and is_packed(model),
            f"the weights are {method} and packed, and this needs their values; {UNPACK}",
        ),
    }
    for kind, (faulty, why) in faults.items():
        if kind in kinds and faulty:
            raise LyapunovPruneError(why)


def require_readable(decoder: Decoder) -> None:
    """Raise LyapunovPruneError unless the weights of the layers are plain matrices: not packed, and parameters."""
    require_weights(decoder.model, "unpacked")
    require_parameters(decoder.structure)


def find_projections(decoder: Decoder) -> tuple[Projection, ...]:
    """Every matrix of every layer, in order; also for a streamed model, whose weights `weights_of` reads.

    Raises LyapunovPruneError for weights that are not plain matrices (quantised, parametrised) or have adapters.
    """
    require_weights(decoder.model, "unadapted")
    require_readable(decoder)
    projections = structure_projections(decoder.structure)
    if not projections:
        raise LyapunovPruneError(
            f"{type(decoder.model).__name__} holds no linear projections in its layers; nothing to check"
        )
    return projections


def require_parameters(structure: Structure) -> None:
    """Raise LyapunovPruneError for a layer's weight that is recomputed at every forward: writes to it would be lost."""
    for name, module in structure.layers.named_modules(prefix=structure.layers_path):
        made = list(module.parametrizations) if is_parametrized(module) else _made_by_hooks(module)
        if made:
            raise LyapunovPruneError(
                f"{name}.{made[0]} is computed from other parameters in every forward; make it a parameter "
                "(torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm, prune.remove)"
            )


def _made_by_hooks(module: nn.Module) -> list[str]:
    """Tensors that older weight_norm, spectral_norm and prune recompute from `weight_g`, `weight_orig` or so."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
        and (name == "weight" or not module._parameters.keys().isdisjoint({f"{name}_g", f"{name}_orig"}))
    ]
