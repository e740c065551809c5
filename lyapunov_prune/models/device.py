"""Devices (which one a name means, how much memory is free), and kernels.

The kernels for attention and experts are chosen on loading and stored in no checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedConfig

from lyapunov_prune.errors import LyapunovPruneError


def resolve_device(name: str) -> str:
    """The torch device for `name`: `auto` is the GPU if there is one, else the CPU; other names are torch's own.

    In processes started by `accelerate launch`, `cuda` means the GPU of this process.

    Raises LyapunovPruneError if there is no such device.
    """
    if name == "disk":
        raise LyapunovPruneError("a model in memory is on no disk; lp.load_streamed reads it a layer at a time")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    if not _usable(name):
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
        gpus += ["mps"] if torch.backends.mps.is_available() else []
        what = "CUDA device" if name == "cuda" else f"device {name}"
        raise LyapunovPruneError(f"there is no {what} here; give {', '.join(['cpu', *gpus])}, auto, spread or disk")
    return name


def free_memory(device: str) -> int:
    """Free bytes on `device`: for a GPU its own memory, with torch's unused reserve; otherwise the machine's."""
    if not device.startswith("cuda"):
        return psutil.virtual_memory().available
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether `device` has instructions for products in bfloat16: a GPU, or an x86 processor of which torch says so."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    told: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not of torch before 2.11
    return device.type == "cpu" and any(told.get(name) for name in ("avx512_bf16", "amx_bf16"))


def require_memory(needed: int, device: str, what: str) -> None:
    """Raise LyapunovPruneError unless `device` has `needed` bytes free for `what`."""
    free = free_memory(device)
    if needed > free:
        raise LyapunovPruneError(
            f"{what} need {needed:,} bytes of memory and {free:,} are free on {device}; lower --tokens, or free some"
        )


def _usable(name: str) -> bool:
    try:
        return torch.empty(1, device=name).device.type != "meta"  # meta holds no numbers
    except (RuntimeError, AssertionError):  # which of the two depends on the missing backend
        return False


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
