"""The kernels for attention and experts; they are chosen on loading and stored in no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedConfig


def kernels(config: PreTrainedConfig) -> dict[str, Any]:
    """Arguments for `from_pretrained` or `from_config` that select the same kernels as a model of `config`.

    Nested parts of a multimodal model keep their own kernels; a single value would apply to all of them.
    """
    return {f"{of}_implementation": _of(config, f"_{of}_implementation") for of in ("attn", "experts")}


@contextmanager
def eager_experts(model: Any) -> Iterator[None]:
    """Inside the block, the experts of `model` run one by one: the fused kernel has no derivative."""
    before = kernels(model.config)["experts_implementation"]
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextmanager
def differentiable(model: Any) -> Iterator[None]:
    """Inside the block, attention and experts of `model` run without their fused kernels: those have no forward-mode
    derivative.
    """
    with sdpa_kernel(SDPBackend.MATH), eager_experts(model):
        yield


def _of(config: Any, name: str) -> Any:
    own = getattr(config, name, None)
    parts = {key: part for key in config.sub_configs if (part := getattr(config, key, None)) is not None}
    return {"": own, **{key: _of(part, name) for key, part in parts.items()}} if parts else own
