"""Compact models as this package sees them: which models have a compact class, and how transformers finds it.

The classes are in `modeling_compact`, a copy of which lies beside the weights of every compact checkpoint. This package
always runs its own copy: it registers its classes with transformers, which then loads no code from the folder.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models import modeling_compact

MODULE = "modeling_compact.py"
PREFIX = "compact_"  # starts the `model_type` of every compact checkpoint
NO_ATTENTION = "no attention is left, and nothing would count positions in the cache of a decoder; keep one"


def family_of(config: Any) -> str:
    """The `model_type`; for a compact model, that of the model it was cut from."""
    return getattr(type(config), "family", config.model_type)  # of the class: config.json may set any attribute


def is_compact(model: PreTrainedModel) -> bool:
    return model.config.model_type.startswith(PREFIX)


def lost_attentions(config: Any) -> str | None:
    """Why a compact model of the text `config` is wrong: no attention is left; None if there is one, or it is plain."""
    cuts = getattr(config, "cuts", None)
    return NO_ATTENTION if cuts and all(map(modeling_compact.lacks_attention, cuts)) else None


def register(family: str) -> Any:
    """The compact class of a `model_type`, known to transformers from now on; None if transformers has none."""
    if family not in CONFIG_MAPPING:
        return None
    plain: Any = CONFIG_MAPPING[family]
    found = modeling_compact.compact_model(plain)
    if found is not None:
        config = found.config_class
        AutoConfig.register(config.model_type, config, exist_ok=True)
        getattr(transformers, found._auto_class).register(config, found, exist_ok=True)
    return found


def compact_class(model: PreTrainedModel) -> Any:
    """The compact class for `model`. Raises LyapunovPruneError for a model that has none."""
    found = register(family_of(model.config))
    config = found and found.config_class
    if found is None or (type(model), type(model.config)) not in (
        (found.__bases__[1], config.__bases__[0]),
        (found, config),
    ):
        why = "is of code from its folder; load it with lyapunov_prune.load"
        if not is_compact(model):
            why = (
                f"is not what AutoModelForCausalLM or AutoModelForImageClassification builds of a "
                f"{type(model.config).__name__}, and only that can be compact; give a model of such a class"
            )
        raise LyapunovPruneError(f"this {type(model).__name__} {why}")
    return found
