"""Whether a model is its plain weights: no adapter beside them, none packed, none elsewhere, no other input needed.

Removal copies weights and saves them. What it cannot do right is refused here, in one line with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder, Model, model_of, wrap
from lyapunov_prune.models.dispatched import bring_all
from lyapunov_prune.models.quantised import UNPACK, quantisation
from lyapunov_prune.models.streamed import require_not_streamed
from lyapunov_prune.models.structure import Structure


def plain(model: Model, handle: Callable[[Model], Decoder] = wrap) -> Decoder:
    """The handle of a model that is its plain weights, which can be copied and saved.

    Raises LyapunovPruneError for adapters, for weights that are quantised, parametrised, streamed or nowhere, and as
    `handle`.
    """
    require_no_adapters(model_of(model))
    require_unquantised(model_of(model))
    require_not_streamed(model_of(model))
    decoder = handle(model)
    require_parameters(decoder.structure)
    return decoder


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
            "(lyapunov_prune.merge_adapters, or prune ADAPTER --merge-adapter)"
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


def require_in_memory(model: nn.Module) -> None:
    """Raise LyapunovPruneError for weights that are nowhere; those that accelerate has offloaded are brought."""
    require_not_streamed(model)
    bring_all(model)
