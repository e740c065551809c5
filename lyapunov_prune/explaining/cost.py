"""What `explain` will take, measured on one window before it starts."""

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

_POSITIONS = 32  # whose predictions are timed


def forwards(layers: int) -> int:
    """How many forwards `explain` takes of each window at most: where every layer and the embedding differ."""
    return layers + 8


@in_eval_mode
@torch.no_grad()
def told_cost(reading: Reading) -> str:
    """At most how many forwards, and about how many minutes, `explain` takes on this batch of the dense model.

    Raises NonFiniteError naming the layer where a state of its first window is not finite.
    """
    layers, ids = reading.structure.num_layers, reading.windows(1)[0]
    Side(reading, tuple(range(layers)), layers).require_finite(ids)
    scorer = reading.scorer
    state, forward = _timed(lambda: predicting(final_state(reading.structure, ids)))
    some = scorer, state[:_POSITIONS]
    _, compared = _timed(lambda: predictions(some, [some], ids[0, 1 : 1 + _POSITIONS])[0])
    head = compared * len(state) / len(some[1]) / 2
    times = 2 * (layers + 2)
    minutes = len(reading.batch) * (forwards(layers) * forward + times * head) / 60
    return (
        f"At most {forwards(layers)} forwards of {reading.batch.tokens:,} tokens, and their predictions {times} times: "
        f"about {max(1, round(minutes))} minutes; less where layers are equal"
    )


def _timed(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What `run` returns, and its seconds: the least of three, since the first warms up and others may be disturbed."""
    seconds = []
    for _ in range(3):
        start = perf_counter()
        found = run()
        seconds.append(perf_counter() - start)
    return found, min(seconds)
