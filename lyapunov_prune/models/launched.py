"""The processes that `accelerate launch` started, which share work, and what all of them must have been given."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import identify


def processes_of(*models: PreTrainedModel) -> PartialState:
    """The processes that `accelerate launch` started, which share work on `models`; they wait for the slowest.

    Raises LyapunovPruneError, in every one of them, where they do not have the same models.
    """
    among = processes(on_cpu=models[0].device.type == "cpu")
    require_same_models(among, *models)
    return among


def require_same_models(among: PartialState, *models: PreTrainedModel) -> None:
    """Raise LyapunovPruneError, in every process, where the processes `among` do not have the same models."""
    if among.num_processes > 1:
        known = [identify(model) for model in models]
        require_alike(among, "models", [[each.architecture, each.weights, each.settings] for each in known])


def require_alike(among: PartialState, what: str, told: Any) -> None:
    """Raise LyapunovPruneError, in every process, where the processes `among` tell different things of `what`."""
    if among.num_processes > 1:
        first, *others = gather_object([told])
        if any(other != first for other in others):
            raise LyapunovPruneError(f"the processes were given different {what}; give all the same")


def processes(*, on_cpu: bool) -> PartialState:
    """The processes that `accelerate launch` started, for work on the CPU or on a GPU of each."""
    before = _joined()
    # Without `cpu` those of a machine that has no GPU would not know of each other.
    among = PartialState(cpu=on_cpu, timeout=timedelta(days=30))
    if on_cpu and _joined() and not before:
        # gloo's threads must not outlive the interpreter: it aborts, the work long done.
        atexit.register(among.destroy_process_group)
    return among


def _joined() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()  # torch for small boards has neither
