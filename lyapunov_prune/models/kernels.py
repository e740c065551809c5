"""By which kernels attention and experts are computed: chosen by the process that loads, and kept in no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig


def kernels(config: PreTrainedConfig) -> dict[str, Any]:
    """What `from_pretrained` or `from_config` has to be told to compute as a model of `config` does.

    Each part of a model with more than text by its own kernel: a value for the whole would go to all of them.
    """
    return {f"{of}_implementation": _of(config, f"_{of}_implementation") for of in ("attn", "experts")}


@contextmanager
def eager_experts(model: Any) -> Iterator[None]:
    """The experts of `model` run one after the other inside the block: the kernel for all has no derivative."""
    before = kernels(model.config)["experts_implementation"]
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _of(config: Any, name: str) -> Any:
    own = getattr(config, name, None)
    parts = {key: part for key in config.sub_configs if (part := getattr(config, key, None)) is not None}
    return {"": own, **{key: _of(part, name) for key, part in parts.items()}} if parts else own
