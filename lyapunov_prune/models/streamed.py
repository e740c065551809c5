"""Models whose layers hold no weights but while they run: read from a checkpoint's files, one layer at a time.

What makes a model one is in `checkpoints.streamed`. Here is what the rest of the program has to know of it: that it is
one, the digests of the weights that it does not hold, and how a layer's are had for as long as they are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError

# What sends a state of all windows through a layer, and gives what leaves it, a piece of the windows after the other.
Run = Callable[[torch.Tensor], Iterator[torch.Tensor]]
# Called with a layer, the state that enters it, and `Run`.
Visit = Callable[[int, torch.Tensor, Run], None]


class Stream(Protocol):
    """`digests` are `weight_digests` of the files; `hold` reads a layer's weights over those of the one held before.

    A layer that is held runs any number of times before `release` without being read again.

    In forwards inside the block of `visiting`, every layer is visited, its weights held, before it runs. What the visit
    makes of the weights is what the layer then runs with, and is gone after it. `finish` takes what leaves the last
    layer to the state that the head reads, without a layer.
    """

    digests: dict[str, str]

    def hold(self, layer: int) -> None: ...

    def release(self) -> None: ...

    def visiting(self, visit: Visit) -> AbstractContextManager[None]: ...

    def finish(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor: ...


class _Kept:
    """The stream of a model, on the model, with which it goes; a copy of it is not streamed and has none."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()


def keep_stream(model: nn.Module, stream: Stream) -> None:
    vars(model)["_stream"] = _Kept(stream)


def stream_of(model: nn.Module) -> Stream | None:
    """What reads the layers of `model`; None for a model in memory."""
    return vars(model).get("_stream", _Kept()).stream


@contextmanager
def layer_held(model: nn.Module, layer: int) -> Iterator[None]:
    """Inside the block the weights of `layer` are in memory, whether `model` is streamed or not."""
    stream = stream_of(model)
    try:
        if stream is not None:
            stream.hold(layer)
        yield
    finally:
        if stream is not None:
            stream.release()


def require_not_streamed(model: nn.Module) -> None:
    """Raise LyapunovPruneError for a streamed model where its weights have to be in memory."""
    if stream_of(model) is not None:
        raise LyapunovPruneError(
            f"the layers of this {type(model).__name__} are streamed from disk, and this needs all of them in memory; "
            "load it whole (without --stream); its files are pruned by prune --on-disk, compressed by compress --stream"
        )
