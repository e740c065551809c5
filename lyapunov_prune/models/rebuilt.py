"""What transformers would build of a model that lost layers: the same class, without weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, in_short


def rebuilt(pruned: PreTrainedModel, config: Any) -> PreTrainedModel:
    """A model of the class of `pruned` and of `config`, on the meta device.

    Raises LyapunovPruneError if the class builds none, which the family's own code decides.
    """
    try:
        with torch.device("meta"):
            fresh: PreTrainedModel = type(pruned)(config)
    except Exception as error:  # the family's own code may raise anything
        raise LyapunovPruneError(
            f"these layers of {type(pruned).__name__} cannot be removed correctly: the model cannot be built without "
            f"them ({in_short(error, 100)}); remove other layers"
        ) from None
    return fresh
