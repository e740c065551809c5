"""What `explain` will take, measured on one window before it starts."""

from __future__ import annotations

from time import perf_counter

import torch

from lyapunov_prune.explaining.blame import predictions
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.forward.states import predicting
from lyapunov_prune.models.structure import in_eval_mode

_POSITIONS = 32  # whose predictions are timed


def forwards(layers: int) -> int:
    """How many forwards `explain` takes of each window at most: where every layer and the embedding differ."""
    return layers + 6


@in_eval_mode
@torch.no_grad()
def told_cost(reading: Reading) -> str:
    """At most how many forwards, and about how many minutes, `explain` takes on this batch of the dense model."""
    scorer, layers = reading.scorer, reading.structure.num_layers
    ids = reading.windows(1)[0]
    start = perf_counter()
    state = predicting(final_state(reading.structure, ids))
    forward = perf_counter() - start
    some = scorer, state[:_POSITIONS]
    start = perf_counter()
    predictions(some, [some], ids[0, 1 : 1 + _POSITIONS])
    head = (perf_counter() - start) * len(state) / len(some[1]) / 2
    times = 2 * (layers + 2)
    minutes = len(reading.batch) * (forwards(layers) * forward + times * head) / 60
    return (
        f"At most {forwards(layers)} forwards of {reading.batch.tokens:,} tokens, and their predictions {times} times: "
        f"about {max(1, round(minutes))} minutes; less where layers are equal"
    )
