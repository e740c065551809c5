"""What rounding costs the prediction, measured: of a whole model, and of one matrix at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from lyapunov_prune.budget.cost import TensorCost
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.forward.replacement import with_data
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.predictions.spaces import divergences

WORST = 4  # matrices whose cost is measured
_WINDOWS = 8  # on so many windows


def kl_by_window(dense: Reading, changed: Reading) -> tuple[np.ndarray, np.ndarray]:
    """KL(dense ‖ changed) of every window, and by how much its loss rises: (windows,) float64.

    Both are in nats a token, over all positions but the last.
    """

    @torch.no_grad()
    def means(first: int, ids: torch.Tensor) -> torch.Tensor:
        sums, wanted = torch.zeros(2, dtype=torch.float64), ids[0, 1:].cpu()
        start = 0
        for pair in zip(dense.logits(ids)[0], changed.logits(ids)[0], strict=True):
            log_p, log_q = (lift(logits).log_softmax(-1) for logits in pair)
            next_ids = wanted[start : start + len(log_p), None].to(log_p.device)
            rise = (log_p.gather(1, next_ids) - log_q.gather(1, next_ids)).sum()
            sums += torch.stack([divergences(log_p, log_q)[1].sum(), rise]).cpu()
            start += len(log_p)
        return sums / len(wanted)

    kl, loss = torch.stack(dealt(dense, 1, means, "divergence")).T.numpy()
    return kl, loss


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
