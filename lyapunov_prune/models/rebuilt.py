"""A model that transformers builds of another config, and what it takes over from the one that it is made of."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.left_out import copy_left_out
from lyapunov_prune.results.history import history_of, keep_history


def built(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of the class `kind` and of `config`, on the meta device."""
    if isinstance(config.dtype, str):  # a class may hand it to torch
        config.dtype = getattr(torch, config.dtype)
    with quiet(), torch.device("meta"):
        return kind(config)


def take_over(source: Any, made: Any) -> None:
    """Give `made` what saving needs of `source`: generation settings, how names were converted, and its history."""
    made.generation_config = copy.deepcopy(getattr(source, "generation_config", None))
    made._weight_conversions = getattr(source, "_weight_conversions", None)
    if hasattr(source, "is_quantized"):  # False if packed weights are unpacked
        made.is_quantized = source.is_quantized
    keep_history(made, history_of(source))
    copy_left_out(source, made)
    made.config._name_or_path = source.config._name_or_path
