"""The processes started by `accelerate launch`, and checks that all of them were given the same."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import identify
from lyapunov_prune.progress import several

T = TypeVar("T")
_alone = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Within the block this process shares no measurement, because the others measure something else, or nothing."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


def stay_alone() -> None:
    """From here on this process shares no measurement: the others have ended."""
    _alone.set(True)


def sharing(model: PreTrainedModel) -> PartialState | None:
    """The processes that share the measurements of `model`; None for a process by itself."""
    if _alone.get() or not (_joined() or several()):
        return None
    among = processes(on_cpu=model.device.type == "cpu")
    return among if among.num_processes > 1 else None


def from_each(model: PreTrainedModel, value: T) -> list[T]:
    """The `value` of every process that shares the measurements of `model`, in their order."""
    return [value] if sharing(model) is None else gather_object([value])


def processes_of(*models: PreTrainedModel) -> PartialState:
    """The processes started by `accelerate launch`, which share work on `models` and wait for the slowest.

    Raises LyapunovPruneError in every process if they do not have the same models.
    """
    among = processes(on_cpu=models[0].device.type == "cpu")
    require_same_models(among, *models)
    return among


def require_same_models(among: PartialState, *models: PreTrainedModel) -> None:
    """Raise LyapunovPruneError in every process if the processes `among` have different models."""
    if among.num_processes > 1:
        known = [identify(model) for model in models]
        require_alike(among, "models", [[each.architecture, each.weights, each.settings] for each in known])


def require_alike(among: PartialState, what: str, told: Any) -> None:
    """Raise LyapunovPruneError in every process if the processes `among` have different values `told`."""
    if among.num_processes > 1:
        first, *others = gather_object([told])
        if any(other != first for other in others):
            raise LyapunovPruneError(f"the processes were given different {what}; give all the same")


def processes(*, on_cpu: bool) -> PartialState:
    """The processes started by `accelerate launch`, for work on the CPU or on one GPU per process."""
    before = _joined()
    # Without `cpu`, processes on a machine without a GPU would not find each other.
    among = PartialState(cpu=on_cpu, timeout=timedelta(days=30))
    if on_cpu and _joined() and not before:
        # gloo's threads must end before the interpreter does, or it aborts after the work is done.
        atexit.register(among.destroy_process_group)
    return among


def _joined() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()  # some builds of torch lack these
