"""Models whose layers are read from a checkpoint's files one at a time, and hold weights only while they run.

`checkpoints.streamed` makes such models. This module holds what the other rooms need: whether a model is streamed, the
digests of weights that are not in memory, and access to one layer's weights at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError

# Takes the states of all windows through a layer and yields its outputs, one piece of the windows after another.
Run = Callable[[torch.Tensor], Iterator[torch.Tensor]]
# Called with a layer's number, the state that enters it, and `Run`.
Visit = Callable[[int, torch.Tensor, Run], None]


class Stream(Protocol):
    """Reads the layers of a model from files.

    `digests` are the `weight_digests` of the files. `hold` reads a layer's weights over those of the previous layer; a
    held layer runs any number of times until `release`.

    Inside `visiting`, each layer is passed to `visit`, with its weights held, before it runs in a forward. The layer
    runs with the weights that the visit leaves, which are dropped afterwards.

    Outside of a forward, `run` takes the state of `ids` through one layer, which is held afterwards, and `finish` takes
    the output of the last layer to the state that the head reads. `ends` returns the state that enters the first layer
    and the logits that follow from that output: what a backward needs beside the layers. `run` raises
    LyapunovPruneError where a gradient would go past the state.
    """

    digests: dict[str, str]

    def hold(self, layer: int) -> None: ...

    def release(self) -> None: ...

    def visiting(self, visit: Visit) -> AbstractContextManager[None]: ...

    def run(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor: ...

    def finish(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor: ...

    def ends(self, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class _Kept:
    """A model's stream, stored on the model. A deep copy of the model is not streamed, so it gets an empty one."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()


def keep_stream(model: nn.Module, stream: Stream) -> None:
    vars(model)["_stream"] = _Kept(stream)


def stream_of(model: nn.Module) -> Stream | None:
    """The reader of the layers of `model`; None for a model in memory."""
    return vars(model).get("_stream", _Kept()).stream


@contextmanager
def layer_held(model: nn.Module, layer: int) -> Iterator[None]:
    """Inside the block, the weights of `layer` are in memory, whether `model` is streamed or not."""
    stream = stream_of(model)
    try:
        if stream is not None:
            stream.hold(layer)
        yield
    finally:
        if stream is not None:
            stream.release()


def require_not_streamed(model: nn.Module) -> None:
    """Raise LyapunovPruneError for a streamed model, if its weights have to be in memory."""
    if stream_of(model) is not None:
        raise LyapunovPruneError(
            f"the layers of this {type(model).__name__} are read from disk one by one, and this needs all of them in "
            "memory; load it whole (without --device disk)"
        )
