"""What rounding costs the prediction, measured one matrix at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lyapunov_prune.budget.cost import TensorCost
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.forward.replacement import with_data
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.predictions.divergence import kl_by_window

WORST = 4  # matrices whose cost is measured
_WINDOWS = 8  # on so many windows


def corrected(
    reading: Reading, rounded: Decoder, found: Sequence[TensorCost], pick: np.ndarray
) -> tuple[list[TensorCost], list[str]]:
    """`found` with the costs of the matrices that cost most measured, one at a time, and their names.

    `rounded` is the model with the types `pick`. Where the KL of one matrix alone is r times its cost c at that type,
    its cost c(q) in type q becomes `c(q) (1 + (r − 1) min(1, c(q) / c))`: second order is right for a small change, and
    errs by a share that grows with it.
    """
    few = replace(reading, batch=reading.batch.take(range(min(_WINDOWS, len(reading.batch)))))
    dense = dict(few.model.named_parameters())
    costs = np.array([t.cost[k] for t, k in zip(found, pick, strict=True)])
    measured = list(found)
    worst = [int(i) for i in costs.argsort()[::-1][:WORST] if costs[i] > 0]
    for i in worst:
        others = {p: dense[name].data for name, p in rounded.model.named_parameters() if name != found[i].name}
        with with_data(others):
            kl = float(kl_by_window(few, read(rounded, few.batch))[0].mean())
        share = np.minimum(found[i].cost / costs[i], 1)
        measured[i] = replace(found[i], cost=found[i].cost * (1 + (kl / costs[i] - 1) * share))
    return measured, [found[i].name for i in worst]
