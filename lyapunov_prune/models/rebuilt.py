"""What transformers would build of a model that lost layers: the same class, without weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from lyapunov_prune.errors import reported


def rebuilt(pruned: PreTrainedModel, config: Any) -> PreTrainedModel:
    """A model of the class of `pruned` and of `config`, on the meta device.

    Raises LyapunovPruneError if the class builds none, which the family's own code decides.
    """
    kind = type(pruned)
    what = f"these layers of {kind.__name__} cannot be removed correctly: the model cannot be built without them"
    with reported(what, "remove other layers", Exception), torch.device("meta"):
        fresh: PreTrainedModel = kind(config)
    return fresh
