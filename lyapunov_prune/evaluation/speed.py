"""Tokens per second, models measured side by side in one run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.progress import track
from lyapunov_prune.results import Result, versions


@dataclass(frozen=True)
class SpeedRow:
    model: str
    parameters: int
    prefill: float  # tokens a second
    decode: float  # tokens a second, batch 1


@dataclass(frozen=True)
class Speed(Result):
    """Prefill and cached decoding, tokens per second, median of `repeats`; the first row is the reference.

    Repeats interleave the models, so that a slow minute of the machine slows all of them alike.
    """

    rows: tuple[SpeedRow, ...]
    prompt: int
    steps: int
    repeats: int
    device: str
    dtype: str
    threads: int
    versions: dict[str, str]

    def to_frame(self) -> pd.DataFrame:
        first = self.rows[0]
        return pd.DataFrame(
            {
                "model": [r.model for r in self.rows],
                "parameters": [r.parameters for r in self.rows],
                "prefill tok/s": [r.prefill for r in self.rows],
                "× dense": [r.prefill / first.prefill for r in self.rows],
                "decode tok/s": [r.decode for r in self.rows],
                "× dense ": [r.decode / first.decode for r in self.rows],
            }
        )

    def headline(self) -> str:
        return (
            f"Speed, {self.dtype} on {self.device} ({self.threads} threads): prompt of {self.prompt}, "
            f"{self.steps} decoded, median of {self.repeats}"
        )


@torch.no_grad()
def measure_speed(
    models: Mapping[str, PreTrainedModel], *, prompt: int = 256, steps: int = 32, repeats: int = 3
) -> Speed:
    """Time a prefill of `prompt` tokens and `steps` cached decoding steps of every model, batch 1.

    One round of warm-up, then `repeats` rounds in which the models take turns; medians are reported. The
    first model is the reference. Token ids are random: speed does not depend on them.

    Raises LyapunovPruneError when prompt and steps do not fit the context.
    """
    names = list(models)
    first = models[names[0]]
    structure = find_structure(first)
    if structure.max_context and prompt + steps > structure.max_context:
        raise LyapunovPruneError(
            f"{prompt} + {steps} tokens do not fit the context of {structure.max_context}; lower them"
        )
    ids = torch.randint(structure.config.vocab_size, (1, prompt + steps), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in track(range(1 + repeats), "speed"):
        for name in names:
            times[name].append(_round(models[name], ids.to(models[name].device), prompt))
    rows = []
    for name in names:
        prefill, decode = np.median(np.array(times[name][1:]), axis=0)
        rows.append(SpeedRow(name, models[name].num_parameters(), prompt / prefill, steps / decode))
    return Speed(
        rows=tuple(rows),
        prompt=prompt,
        steps=steps,
        repeats=repeats,
        device=first.device.type,
        dtype=str(first.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        versions=versions(),
    )


def _round(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> tuple[float, float]:
    """Seconds for the prefill and for all decoding steps."""
    start = _now(model)
    output = model(ids[:, :prompt], use_cache=True)
    middle = _now(model)
    for t in range(prompt, ids.shape[1]):
        output = model(ids[:, t : t + 1], past_key_values=output.past_key_values, use_cache=True)
    return middle - start, _now(model) - middle


def _now(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # kernels are queued, not done, when a call returns
    return time.perf_counter()
