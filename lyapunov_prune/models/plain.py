"""Whether a model is its plain weights: no adapter beside them, none packed, none elsewhere, no other input needed.

Removal copies weights and saves them. What it cannot do right is refused here, in one line with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lyapunov_prune.arguments import Parsed
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder, Model, in_memory, model_of, wrap, wrap_any
from lyapunov_prune.models.quantised import UNPACK, quantisation
from lyapunov_prune.models.structure import Structure


def plain(model: Model, handle: Callable[[Model], Decoder] = wrap) -> Decoder:
    """The handle of a model that is its plain weights, which can be copied and saved.

    Raises LyapunovPruneError for adapters, for weights that are quantised, parametrised, streamed or nowhere, and as
    `handle`.
    """
    require_no_adapters(model_of(model))
    require_unquantised(model_of(model))
    decoder = in_memory(model, handle)
    require_parameters(decoder.structure)
    return decoder


# The models that can be copied and saved: decoders alone, and classifiers of images too.
Plain = Annotated[Decoder, Parsed(Model, plain)]
PlainAny = Annotated[Decoder, Parsed(Model, partial(plain, handle=wrap_any))]


def require_unquantised(model: nn.Module) -> None:
    """Raise LyapunovPruneError for the model of a quantised checkpoint, unpacked on loading or not.

    What is made of it would be dense, and as rough as the integers were.
    """
    method = quantisation(getattr(model, "config", None))
    if method:
        raise LyapunovPruneError(f"the weights are {method}; {UNPACK}")


def require_no_adapters(model: nn.Module) -> None:
    adapted = [name for name, m in model.named_modules() if hasattr(m, "base_layer") and hasattr(m, "lora_A")]
    if adapted or hasattr(model, "peft_config"):
        where = f" to {len(adapted)} matrices ({adapted[0]}, …)" if adapted else ""
        raise LyapunovPruneError(
            f"adapters are attached{where}, which a plain checkpoint cannot hold; merge them first "
            "(lyapunov_prune.models.merge_adapters, or prune ADAPTER --merge-adapter)"
        )


def require_parameters(structure: Structure) -> None:
    """Raise LyapunovPruneError for a weight of a layer that is made anew at every forward: what is written is lost."""
    for name, module in structure.layers.named_modules(prefix=structure.layers_path):
        made = list(module.parametrizations) if is_parametrized(module) else _made_by_hooks(module)
        if made:
            raise LyapunovPruneError(
                f"{name}.{made[0]} is no parameter, but made of others at every forward; make it one (torch.nn.utils."
                "parametrize.remove_parametrizations, remove_weight_norm, remove_spectral_norm or prune.remove)"
            )


def _made_by_hooks(module: nn.Module) -> list[str]:
    """What the older weight_norm, spectral_norm and prune leave: `weight` on the instance, made of `weight_g` or so."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
        and (name == "weight" or not module._parameters.keys().isdisjoint({f"{name}_g", f"{name}_orig"}))
    ]
