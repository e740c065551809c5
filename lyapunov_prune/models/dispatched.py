"""Models whose layers accelerate lays over several GPUs (a device map)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.hooks import add_hook_to_module
from accelerate.utils import get_balanced_memory
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.device import free_memory

SPREAD = "spread"  # the device of a model over all GPUs
_DISK = "give --device disk, which reads one layer at a time"


def over_gpus(model: PreTrainedModel) -> dict[str, int | str]:
    """A GPU for every module of `model`, which may be on `meta`, as accelerate balances them.

    Raises LyapunovPruneError without a GPU, and if their memory together does not hold the model.
    """
    free: dict[int | str, int | str] = {i: free_memory(f"cuda:{i}") for i in range(torch.cuda.device_count())}
    if not free:
        raise LyapunovPruneError(f"there is no GPU here to lay layers over; leave out --device {SPREAD}, or {_DISK}")
    whole: Any = {"no_split_module_classes": list(model._no_split_modules or ())}
    places: dict[str, int | str] = infer_auto_device_map(model, get_balanced_memory(model, free, **whole), **whole)
    if "disk" in places.values():
        raise LyapunovPruneError(f"the memory of {len(free)} GPUs does not hold {type(model).__name__}; {_DISK}")
    return places


def require_numbers(model: nn.Module) -> None:
    """Raise LyapunovPruneError if weights are on `meta`: accelerate leaves offloaded ones there between forwards."""
    elsewhere = [name for name, p in model.named_parameters() if p.is_meta]
    if elsewhere:
        raise LyapunovPruneError(
            f"{len(elsewhere)} weights hold no numbers ({elsewhere[0]}, …); load the model whole "
            f"(lyapunov_prune.load), or {_DISK}"
        )


def is_dispatched(model: nn.Module) -> bool:
    """Whether accelerate's hooks run the forwards of `model`, over one or several devices."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def placement(model: Any) -> Any:
    """The `device_map` for `from_pretrained` that puts another model where `model` is."""
    return vars(model).get("hf_device_map", model.device) if is_dispatched(model) else model.device


def place_alike(module: nn.Module, other: nn.Module) -> None:
    """Let `other` run where accelerate runs `module`; its tensors are there already."""
    if hasattr(module, "_hf_hook"):
        hook: Any = copy.copy(module._hf_hook)
        hook.init_hook = lambda module: module  # would move tensors, some of which are still on meta
        add_hook_to_module(other, hook)
