"""The time that `explain` will take, measured on one window before it starts."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from lyapunov_prune.explaining.blame import predictions
from lyapunov_prune.explaining.pair import Side
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.forward.states import predicting
from lyapunov_prune.models.structure import in_eval_mode

_POSITIONS, _CHANGES = 32, 8  # positions and changed models whose predictions are timed
# The most times that the files of a streamed model are read, including the checks and timing beforehand.
READINGS = 16


def forwards(layers: int) -> int:
    """The most forwards that `explain` takes of each window: all layers and the embedding differ."""
    return layers + 8


@in_eval_mode
def told_cost(reading: Reading) -> str:
    """At most how many forwards, and about how many minutes, `explain` takes on this batch of the dense model.

    Raises NonFiniteError naming the layer if a state of its first window is not finite.
    """
    layers, streamed = reading.structure.num_layers, reading.decoder.stream is not None
    ids = reading.windows(1)[0]
    Side(reading, tuple(range(layers)), layers).require_finite(ids)
    scorer = reading.scorer
    repeats = 1 if streamed else 3
    state, forward = _timed(lambda: predicting(final_state(reading.structure, ids)), repeats)
    some = state[:_POSITIONS]
    changed = [(scorer, some.roll(1, 0))] * _CHANGES
    _, compared = _timed(lambda: predictions((scorer, some), changed, ids[0, 1 : 1 + len(some)])[0], 3)
    # The time to read the files of a streamed model: that of a forward of one token.
    read = _timed(lambda: final_state(reading.structure, ids[:1, :1]), 1)[1] if streamed else 0.0
    head = compared * len(state) / len(some) / _CHANGES
    times = 2 * (layers + 2)
    passes = forwards(layers) * max(0.0, forward - read) + times * head
    minutes = (len(reading.windows(1)) * passes + 2 * READINGS * read) / 60
    files = f"; the files of each are read up to {READINGS} times" if streamed else ""
    return (
        f"At most {forwards(layers)} forwards of {reading.batch.tokens:,} tokens, and their predictions {times} times: "
        f"about {max(1, round(minutes))} minutes{files}; less where layers are equal"
    )


def _timed(run: Callable[[], torch.Tensor], repeats: int) -> tuple[torch.Tensor, float]:
    """What `run` returns, and its seconds: the least of `repeats`, because the first run warms up."""
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        found = run()
        seconds.append(perf_counter() - start)
    return found, min(seconds)
