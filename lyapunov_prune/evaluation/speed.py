"""Tokens or images per second, with models measured in turn in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel

from lyapunov_prune.arguments import SOME, Count, checked
from lyapunov_prune.data.batch import require_context
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.logits import carried_on, random_images
from lyapunov_prune.models.decoder import Model, model_of
from lyapunov_prune.models.hooked import held
from lyapunov_prune.models.pictures import looks_at_images
from lyapunov_prune.models.streamed import require_not_streamed
from lyapunov_prune.models.structure import Structure, find_structure
from lyapunov_prune.progress import track
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import Result, versions


def prompt_for(structure: Structure) -> int:
    """Number of prompt tokens that a model is timed on: 256, or half of a shorter context."""
    return structure.at_most(512) // 2


@dataclass(frozen=True)
class SpeedRow:
    """Tokens per second (images for a classifier, without decoding): the median and the quartiles."""

    model: str
    parameters: int
    prefill: float
    prefill_quartiles: tuple[float, ...]
    decode: float
    decode_quartiles: tuple[float, ...]


# The columns of each phase: tokens per second, and how many times those of the first model.
PHASES = {phase: (f"{phase} tok/s", f"{phase} ratio") for phase in ("prefill", "decode")}


def speed_columns(rows: Sequence[SpeedRow], phases: Mapping[str, tuple[str, str]] = PHASES) -> dict[str, list[float]]:
    """The speeds of `rows` in each of `phases`, and their ratios to the first row."""
    found = {}
    for phase, (speed, ratio) in phases.items():
        found[speed] = [getattr(row, phase) for row in rows]
        found[ratio] = [each / found[speed][0] for each in found[speed]]
    return found


@dataclass(frozen=True)
class Speed(Result):
    """Prefill and cached decoding at batch 1, in tokens per second; the first row is the reference.

    Medians over `repeats` prefills and over all decoded tokens. Repeats interleave the models, so that a slow period of
    the machine affects all of them. For image classifiers: images per second in forwards of `prompt` images, without
    `steps`.
    """

    rows: tuple[SpeedRow, ...]
    prompt: int
    steps: int
    repeats: int
    device: str
    dtype: str
    threads: int
    versions: dict[str, str]
    images: bool = False

    def to_frame(self) -> pd.DataFrame:
        models = {name: [getattr(r, name) for r in self.rows] for name in ("model", "parameters")}
        phases = {"prefill": ("images/s", "ratio")} if self.images else PHASES
        return pd.DataFrame({**models, **speed_columns(self.rows, phases)})

    def answer(self) -> list[str]:
        first = self.rows[0]
        where = f"{self.dtype} on {self.device}, {self.threads} threads"
        if self.images:
            return [
                f"{r.model}: {r.prefill / first.prefill:.2f} × the images/s of {first.model}." for r in self.rows[1:]
            ]
        return [
            f"{r.model}: {r.prefill / first.prefill:.2f} × the prefill and {r.decode / first.decode:.2f} × the "
            f"decoding speed of {first.model} ({where})."
            for r in self.rows[1:]
        ] or [f"{first.model}: {first.prefill:.4g} tokens/s of prefill, {first.decode:.4g} decoding ({where})."]

    def headline(self) -> str:
        run = f"prompt of {self.prompt}, {self.steps} tokens decoded"
        return (
            f"Speed, {self.dtype} on {self.device} ({self.threads} threads): "
            f"{f'{self.prompt} images at once' if self.images else run}, {self.repeats} times"
        )


@checked
@torch.no_grad()
def measure_speed(
    models: Annotated[Mapping[str, Model], SOME], *, prompt: Count = 256, steps: Count = 16, repeats: Count = 5
) -> Speed:
    """Time a prefill of `prompt` tokens and `steps` cached decoding steps of every model at batch 1.

    For image classifiers: one forward of `prompt` images; `steps` is ignored.

    One warm-up round, then `repeats` rounds in which the models take turns. The first model is the reference. Token ids
    and pixels are random, because speed does not depend on them. A decoder without a cache reads the whole text again
    at every step, one with length-dependent positions (`models.positions`) at the steps where they change.

    Raises LyapunovPruneError when prompt and steps do not fit the context, for text models mixed with image models, for
    a streamed model, and for zero models, prompt, steps or repeats.
    """
    given = {name: model_of(model) for name, model in models.items()}
    for model in given.values():
        require_not_streamed(model)  # this would time the disk
    first = next(iter(given.values()))
    images = looks_at_images(first)
    if any(looks_at_images(model) != images for model in given.values()):
        raise LyapunovPruneError("some of the models read text and some read images; time models of one kind")
    inputs = random_images(first, prompt) if images else _random_ids(first, prompt, steps)
    prefills: dict[str, list[float]] = {name: [] for name in given}
    decodes: dict[str, list[float]] = {name: [] for name in given}
    with held(*given.values()):
        for turn in track(range(1 + repeats), "speed"):
            for name, model in given.items():
                prefill, decode = _round(model, inputs.to(model.device), prompt)
                if turn > 0:  # the first round is warm-up
                    prefills[name].append(prefill)
                    decodes[name] += decode
    rows = []
    for name, model in given.items():
        rows.append(SpeedRow(name, model.num_parameters(), *prefill_and_decode(prompt, prefills[name], decodes[name])))
    return Speed(
        rows=tuple(rows),
        prompt=prompt,
        steps=0 if images else steps,
        repeats=repeats,
        device=first.device.type,
        dtype=str(first.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        versions=versions(),
        images=images,
    )


def prefill_and_decode(
    prompt: int, prefills: ArrayLike, decodes: ArrayLike
) -> tuple[float, tuple[float, ...], float, tuple[float, ...]]:
    """Tokens per second, from seconds: median and quartiles over the prompts, and over the steps (NaN without any)."""
    low, middle, high = (prompt / np.percentile(np.asarray(prefills), [75, 50, 25])).tolist()
    steps = np.asarray(decodes)
    slow, usual, fast = (1 / np.percentile(steps, [75, 50, 25])).tolist() if steps.size else [math.nan] * 3
    return middle, (low, high), usual, (slow, fast)


def _random_ids(model: PreTrainedModel, prompt: int, steps: int) -> torch.Tensor:
    structure = find_structure(model)
    require_context(structure, prompt, steps)
    return torch.randint(structure.config.vocab_size, (1, prompt + steps), generator=torch.Generator().manual_seed(0))


def _round(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> tuple[float, list[float]]:
    """Seconds for the prefill (or the forward of all images), and for each decoding step."""
    marks = [now(model)]
    if ids.is_floating_point():
        model(pixel_values=ids)
        return now(model) - marks[0], []
    output = model(ids[:, :prompt], use_cache=True)
    marks.append(now(model))
    for t in range(prompt, ids.shape[1]):
        carried = carried_on(model, output, t)
        output = model(ids[:, t : t + 1] if carried else ids[:, : t + 1], **carried, use_cache=True)
        marks.append(now(model))
    seconds = np.diff(marks).tolist()
    return seconds[0], seconds[1:]


def now(model: PreTrainedModel) -> float:
    """The clock in seconds, after all work queued for `model` has finished."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # kernels run asynchronously
    return time.perf_counter()
