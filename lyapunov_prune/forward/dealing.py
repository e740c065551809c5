"""Windows dealt out to the processes of `accelerate launch`, and what they measured brought together.

A measurement is a list with an entry, or a sum with a term, for every window, so that each process can take a share of
the windows. A process by itself takes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

T = TypeVar("T")


def dealt(reading: Reading, batch_size: int, measure: Callable[[int, torch.Tensor], T], description: str) -> list[T]:
    """What `measure` returns for all windows, `batch_size` at a time, in the order of the text, in every process.

    `measure` is given the number of the first of these windows, and their ids. What it returns is sent to the other
    processes: numbers, arrays, tensors on the CPU. Sums that it adds to hold the share of this process alone, until
    `summed`. Every process has to come here.

    A LyapunovPruneError of `measure` is raised in every process: the one of the first window, as by one process alone.
    Raises LyapunovPruneError in every process if they have other models or texts, or are at another measurement.
    """
    among = sharing(reading.model)
    if among is None:
        parts = _numbered(reading.windows(batch_size))
        return [measure(*part) for part in _tracked(parts, description)]
    reading.once("alike", lambda: require_alike(among, "models or texts", _about(reading)))
    windows = reading.windows(batch_size)
    if reading.decoder.stream is not None:  # all windows in one forward, of each process
        windows = list(windows[0].chunk(among.num_processes))
    mine = _numbered(windows)[among.process_index :: among.num_processes]
    found: dict[int, T] = {}
    failed: list[tuple[int, LyapunovPruneError]] = []
    try:
        for first, ids in _tracked(mine, description):
            found[first] = measure(first, ids)
    except LyapunovPruneError as error:
        failed.append((mine[len(found)][0], error))
    told = gather_object([(description, found, failed)])
    if any(other != description for other, *_ in told):
        raise LyapunovPruneError(
            f"the processes are at different measurements, {' and '.join(sorted({other for other, *_ in told}))}; "
            "start all of them with the same command and the same kept work"
        )
    if errors := [error for *_, failures in told for error in failures]:
        _, first_error = min(errors, key=lambda numbered: numbered[0])
        first_error.in_all = True
        raise first_error
    whole = {first: value for _, values, _ in told for first, value in values.items()}
    return [whole[first] for first in sorted(whole)]


def summed(model: PreTrainedModel, *sums: np.ndarray | torch.Tensor) -> None:
    """Replace each of `sums`, in every process that shares measurements of `model`, by its sum over them."""
    among = sharing(model)
    if among is None:
        return
    for each in sums:
        own = torch.from_numpy(each) if isinstance(each, np.ndarray) else each
        own.copy_(reduce(own.to(among.device), "sum"))


def _numbered(windows: list[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Each batch of windows with the number of its first."""
    return list(zip(accumulate(map(len, windows), initial=0), windows, strict=False))


def _tracked(parts: list[tuple[int, torch.Tensor]], description: str) -> Iterable[tuple[int, torch.Tensor]]:
    """`parts` under a bar, but for a single one, which has nothing to show."""
    return track(parts, description) if len(parts) > 1 else parts


def _about(reading: Reading) -> list[object]:
    known = reading.decoder.identity
    return [known.architecture, known.weights, known.settings, reading.batch.text_hash]
