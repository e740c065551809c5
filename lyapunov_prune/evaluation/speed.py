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
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from lyapunov_prune.arguments import SOME, Count, checked
from lyapunov_prune.data.batch import require_context
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.logits import carried_on, random_images
from lyapunov_prune.models.decoder import Model, model_of
from lyapunov_prune.models.hooked import held
from lyapunov_prune.models.pictures import looks_at_images
from lyapunov_prune.models.streamed import require_not_streamed
from lyapunov_prune.models.structure import Structure, find_layers, find_structure
from lyapunov_prune.progress import track
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import Result, versions
from lyapunov_prune.results.wording import number


def prompt_for(structure: Structure) -> int:
    """Number of prompt tokens that a model is timed on: 256, or half of a shorter context."""
    return structure.at_most(512) // 2


@dataclass(frozen=True)
class Faster:
    """How many times as fast as the first model: the median of the ratios of the rounds, in which the models alternate.

    `low` and `high` are its 95 % bootstrap interval over rounds (percentiles), NaN for one round. `most` is what
    arithmetic allows at most, NaN where it is not known: the ratio of the multiplications of a forward, or of the
    numbers of layers if that is larger (all costs of a layer go with it), and in decoding of the bytes of the layers.
    """

    value: float
    low: float
    high: float
    most: float

    @classmethod
    def of(cls, ratios: np.ndarray, most: float) -> Faster:
        low = high = math.nan
        if len(ratios) > 1:
            low, high = stats.bootstrap((ratios,), np.median, method="percentile", rng=0).confidence_interval
        return cls(float(np.median(ratios)), float(low), float(high), most)

    @property
    def busy(self) -> bool:
        """Whether the machine did something else at times, since no model can be so much faster."""
        return self.low > 1.001 * self.most  # a clock rounds

    def told(self) -> str:
        if self.busy:
            return f"unknown (machine busy: measured beyond the × {self.most:.2f} that its operations allow)"
        told = f"× {self.value:.2f}"
        if math.isfinite(self.low):
            told += f" ({self.low:.2f} to {self.high:.2f})"
        return told + (f" (its operations allow {self.most:.2f} at most)" if math.isfinite(self.most) else "")


@dataclass(frozen=True)
class SpeedRow:
    """Tokens per second (images for a classifier, without decoding): the median and the quartiles.

    `prefill_ratio` and `decode_ratio` compare with the first model; None in its own row and in older files.
    """

    model: str
    parameters: int
    prefill: float
    prefill_quartiles: tuple[float, ...]
    decode: float
    decode_quartiles: tuple[float, ...]
    prefill_ratio: Faster | None = None
    decode_ratio: Faster | None = None

    def told(self, phase: str) -> str:
        """The speed in `phase` against that of the first model, if it was compared."""
        ratio: Faster | None = getattr(self, f"{phase}_ratio")
        return f"{number(getattr(self, phase))} tokens/s" if ratio is None else ratio.told()


# The columns of each phase: tokens per second, and how many times those of the first model.
PHASES = {phase: (f"{phase} tok/s", f"{phase} ratio") for phase in ("prefill", "decode")}


def speed_columns(rows: Sequence[SpeedRow], phases: Mapping[str, tuple[str, str]] = PHASES) -> dict[str, list[float]]:
    """The speeds of `rows` in each of `phases`, and their ratios to the first row; NaN where the machine was busy."""
    found = {}
    for phase, (speed, ratio) in phases.items():
        found[speed] = [getattr(row, phase) for row in rows]
        found[ratio] = []
        for row, speed_of in zip(rows, found[speed], strict=True):
            faster: Faster | None = getattr(row, f"{phase}_ratio")
            plain = speed_of / found[speed][0]
            found[ratio].append(plain if faster is None else math.nan if faster.busy else faster.value)
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
        where = f"{self.dtype} on {self.device}, {self.threads} thread{'s' * (self.threads > 1)}"
        if self.images:
            return [f"{r.model}, images/s against {first.model}: {r.told('prefill')}." for r in self.rows[1:]]
        return [
            f"{r.model} against {first.model} ({where}): prefill {r.told('prefill')}; decoding {r.told('decode')}."
            for r in self.rows[1:]
        ] or [f"{first.model}: {first.prefill:.4g} tokens/s of prefill, {first.decode:.4g} decoding ({where})."]

    def headline(self) -> str:
        run = f"prompt of {self.prompt}, {self.steps} tokens decoded"
        return (
            f"Speed, {self.dtype} on {self.device} ({self.threads} thread{'s' * (self.threads > 1)}): "
            f"{f'{self.prompt} images at once' if self.images else run}, {self.repeats} times"
        )


@checked
@torch.no_grad()
def measure_speed(
    models: Annotated[Mapping[str, Model], SOME], *, prompt: Count = 256, steps: Count = 16, repeats: Count = 5
) -> Speed:
    """Time a prefill of `prompt` tokens and `steps` cached decoding steps of every model at batch 1.

    For image classifiers: one forward of `prompt` images; `steps` is ignored.

    One warm-up round, then `repeats` rounds in which the models take turns, so that a slow period of the machine meets
    all of them. The first model is the reference, to which the others are compared round by round (`Faster`). Token ids
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
    decodes: dict[str, list[list[float]]] = {name: [] for name in given}
    work = {}
    with held(*given.values()):
        for turn in track(range(1 + repeats), "speed"):
            for name, model in given.items():
                prefill, decode = _round(model, inputs.to(model.device), prompt)
                if turn > 0:  # the first round is warm-up
                    prefills[name].append(prefill)
                    decodes[name].append(decode)
        if len(given) > 1:
            work = {name: _work(model, inputs.to(model.device), prompt) for name, model in given.items()}
    return Speed(
        rows=speed_rows(
            [(name, model.num_parameters()) for name, model in given.items()],
            prompt,
            list(prefills.values()),
            list(decodes.values()),
            list(work.values()),
        ),
        prompt=prompt,
        steps=0 if images else steps,
        repeats=repeats,
        device=first.device.type,
        dtype=str(first.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        versions=versions(),
        images=images,
    )


def speed_rows(
    models: Sequence[tuple[str, int]],
    prompt: int,
    prefills: ArrayLike,
    decodes: ArrayLike,
    work: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> tuple[SpeedRow, ...]:
    """A row for each of `models`, by name and parameters, compared with the first round by round.

    `prefills` (models, rounds) and `decodes` (models, rounds, steps) are seconds. `work` holds by model what a prefill
    and what a decoded token takes, each in several measures of which the time is at least one's share.
    """
    rows = []
    reading, writing = np.asarray(prefills), np.asarray(decodes)
    for k, (name, parameters) in enumerate(models):
        speeds = prefill_and_decode(prompt, reading[k], writing[k].ravel())
        faster: list[Faster | None] = [None, None]
        if k:
            most = [max(first / mine) for first, mine in zip(work[0], work[k], strict=True)] if work else [math.nan] * 2
            faster[0] = Faster.of(reading[0] / reading[k], float(most[0]))
            if writing.size:
                faster[1] = Faster.of(writing[0].sum(-1) / writing[k].sum(-1), float(most[1]))
        rows.append(SpeedRow(name, parameters, *speeds, *faster))
    return tuple(rows)


def _work(model: PreTrainedModel, inputs: torch.Tensor, prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """What `Faster.most` goes by: operations and layers, of a prefill; of one token the bytes of the layers as well."""
    layers = find_layers(model)
    size = sum(tensor.nbytes for tensor in layers.layers.state_dict().values())
    images = inputs.is_floating_point()
    flops = []
    for part in (inputs, inputs[:1]) if images else (inputs[:, :prompt], inputs[:, :1]):
        with FlopCounterMode(display=False) as counter:
            model(pixel_values=part) if images else model(part)
        flops.append(max(counter.get_total_flops(), 1))
    read, wrote = flops
    return np.array([read, layers.num_layers], dtype=float), np.array([wrote, layers.num_layers, size], dtype=float)


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
