"""Windows dealt out to the processes of `accelerate launch`, and what they measured brought together.

A measurement is a list with an entry, or a sum with a term, for every window, so that each process can take a share of
the windows. A process by itself takes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object, reduce
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.models.launched import require_alike, sharing
from lyapunov_prune.progress import track

A = TypeVar("A")
T = TypeVar("T")


def dealt(reading: Reading, batch_size: int, measure: Callable[[int, torch.Tensor], T], description: str) -> list[T]:
    """What `measure` returns for all windows, `batch_size` at a time, in the order of the text, in every process.

    `measure` is given the number of the first of these windows, and their ids. What it returns is sent to the other
    processes: numbers, arrays, tensors on the CPU. Sums that it adds to hold the share of this process alone, until
    `summed`. Every process has to come here.

    Raises as `shared_out`.
    """
    windows = windows_of(reading, batch_size)
    parts = list(zip(accumulate(map(len, windows), initial=0), windows, strict=False))
    return shared_out(reading, parts, lambda part: measure(*part), description)


def windows_of(reading: Reading, batch_size: int) -> list[torch.Tensor]:
    """`Reading.windows`, `batch_size` at a time or fewer, so that there are as many batches as processes."""
    among = sharing(reading.model)
    if among is None:
        return reading.windows(batch_size)
    if reading.decoder.stream is not None:
        return list(reading.windows(batch_size)[0].chunk(among.num_processes))
    return reading.windows(min(batch_size, -(-len(reading.batch) // among.num_processes)))


def shared_out(reading: Reading, items: Sequence[A], measure: Callable[[A], T], description: str) -> list[T]:
    """`measure` of every one of `items`, in their order, in every process; each is measured by one of them.

    A bar says how far they are, unless `description` is empty. A LyapunovPruneError of `measure` is raised in every
    process: that of the first item, as by one process alone.
    Raises LyapunovPruneError in every process if they have other models or texts, or are at another measurement.
    """
    among = sharing(reading.model)
    if among is None:
        return [measure(item) for item in _tracked(items, description)]
    reading.once("alike", lambda: require_alike(among, "models or texts", _about(reading)))
    mine = range(len(items))[among.process_index :: among.num_processes]
    found: dict[int, T] = {}
    failed: list[tuple[int, LyapunovPruneError]] = []
    try:
        for number, item in zip(mine, _tracked([items[number] for number in mine], description), strict=True):
            found[number] = measure(item)
    except LyapunovPruneError as error:
        failed.append((mine[len(found)], error))
    told = gather_object([(f"{description} of {len(items)}", found, failed)])
    if len(steps := {step for step, *_ in told}) > 1:
        raise LyapunovPruneError(
            f"the processes are at different measurements, {' and '.join(sorted(steps))}; start all of them with the "
            "same command and the same kept work"
        )
    if errors := [error for *_, failures in told for error in failures]:
        _, earliest = min(errors, key=lambda numbered: numbered[0])
        earliest.in_all = True
        raise earliest
    whole = {number: value for _, values, _ in told for number, value in values.items()}
    return [whole[number] for number in range(len(items))]


def own_windows(reading: Reading) -> range:
    """The numbers of the windows of this process: all of them for a process by itself."""
    among, every = sharing(reading.model), range(len(reading.batch))
    return every if among is None else every[among.process_index :: among.num_processes]


def own_share(reading: Reading) -> Reading:
    """The windows of this process alone, at least one for each process: all of them for a process by itself."""
    mine = own_windows(reading)
    return reading if len(mine) == len(reading.batch) else Reading(reading.decoder, reading.batch.take(mine))


def summed(model: PreTrainedModel, *sums: np.ndarray | torch.Tensor) -> None:
    """Replace each of `sums`, in every process that shares measurements of `model`, by its sum over them."""
    among = sharing(model)
    if among is None:
        return
    for each in sums:
        own = torch.from_numpy(each) if isinstance(each, np.ndarray) else each
        own.copy_(reduce(own.to(among.device), "sum"))


def _tracked(items: Sequence[A], description: str) -> Iterable[A]:
    """`items` under a bar, but for a single one, which has nothing to show."""
    return track(items, description) if description and len(items) > 1 else items


def _about(reading: Reading) -> list[object]:
    known = reading.decoder.identity
    return [known.architecture, known.weights, known.settings, reading.batch.text_hash]
