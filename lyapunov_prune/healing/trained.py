"""Which parameters are trained and in which order the data comes: shared by healing and recovery."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.healing.low_rank import low_rank_updates
from lyapunov_prune.models.dispatched import is_dispatched
from lyapunov_prune.models.hooked import overridden
from lyapunov_prune.models.sharing import shared_memo
from lyapunov_prune.models.structure import find_layers

MOST_DRAWN = 10_000_000  # items in an order, which is a list in memory


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block no parameter of `model` gets a gradient, unless the block says so."""
    flags = {p: p.requires_grad for p in model.parameters()}
    try:
        model.requires_grad_(False)
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
            parameter.grad = None


@contextmanager
def trained(model: PreTrainedModel, rank: int | None, seed: int) -> Iterator[dict[str, nn.Parameter]]:
    """The parameters to train, by name; no others in `model` get a gradient inside the block.

    Without `rank` those of the layers, with it the factors of `low_rank_updates`, which are merged at the end of the
    block.
    """
    with frozen(model):
        if rank is not None:
            with low_rank_updates(model, rank, seed) as factors:
                yield factors
        else:
            layers = find_layers(model).layers
            layers.requires_grad_(True)
            yield dict(layers.named_parameters())


def beside(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` with its own parameters that share storage with the model's until they are replaced."""
    return copy.deepcopy(model, shared_memo(model))


@contextmanager
def recomputed(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, layers keep only their inputs for the backward pass and run again there.

    The gradients are bit for bit the same if the layers are deterministic.
    """
    with ExitStack() as stack:
        for layer in dict.fromkeys(find_layers(model).layers):  # one may occur several times
            again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            stack.enter_context(overridden(layer, again))
        yield


def require_trainable(model: PreTrainedModel, called: str, rank: int | None = None) -> None:
    """Raise LyapunovPruneError for half-precision parameters without `rank`, or for several devices.

    The message calls the model `called`.
    """
    narrow = next((p.dtype for p in model.parameters() if p.dtype not in (torch.float32, torch.float64)), None)
    why = ""
    if narrow is not None and rank is None:
        why = (
            f"in {str(narrow).removeprefix('torch.')}, which loses small steps; load it in float32, or heal with "
            "low-rank updates (--update-rank)"
        )
    elif is_dispatched(model):
        why = "spread over several devices, and training needs it on one; load it on one"
    if why:
        raise LyapunovPruneError(f"{called} is {why}")


def drawn_order(items: int, steps: int, seed: int) -> list[int]:
    """The item of each step: a random permutation of all items, then another. A longer order has the same beginning.

    Raises LyapunovPruneError for more than MOST_DRAWN.
    """
    require_few(steps)
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(items, generator=generator) for _ in range(math.ceil(steps / items))]
    return torch.cat(rounds)[:steps].tolist()


def require_few(windows: int) -> None:
    """Raise LyapunovPruneError if training would draw more than MOST_DRAWN windows."""
    if windows > MOST_DRAWN:
        raise LyapunovPruneError(f"the steps would take {windows:,} windows; give fewer, {MOST_DRAWN:,} at most")
