"""Compress as much as a method can while the prediction moves by no more than a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Count, Positive, Share
from lyapunov_prune.compression.asking import require_options, require_spendable
from lyapunov_prune.compression.compress import Compressed, compress
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.forward.states import predicting, require_finite_states
from lyapunov_prune.models.decoder import runs_model
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.predictions.tiles import measures
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.history import add_step
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

# From least to most compression.
_LEVELS = {"sparsity": tuple(n / 100 for n in range(1, 100)), "bits": tuple(float(n) for n in range(8, 1, -1))}


@dataclass(frozen=True)
class BudgetedCompression(Result):
    """The amounts of `method` that a bisection tried, from least to most compression, and their cost.

    Arrays are (n,) float64, means over every position of a window except the last, with `p` of the dense model and `q`
    of the compressed one: `kl = KL(p‖q)` in nats per token, `flipped` the share of positions whose most likely token
    differs. Both are NaN for an amount that the method or the schedule cannot meet. The method was calibrated on other
    windows (`calibrated_on`) than the costs were measured on, but those chose the amount (used to choose): its own
    `kl` is a little too low. `unit` is sparsity (in hundredths) or bits. The bisection
    assumes that the cost rises with compression; if it does not, more than `amount` may also be within `max_kl`.
    """

    method: str
    schedule: str
    unit: str
    amounts: np.ndarray
    kl: np.ndarray
    flipped: np.ndarray
    max_kl: float
    measured_on: MeasuredOn
    calibrated_on: MeasuredOn

    @property
    def chosen(self) -> int:
        """Index of the most compression tried within the budget. Raises LyapunovPruneError if there is none."""
        within = np.flatnonzero(self.kl <= self.max_kl)  # NaN is over any budget
        if not len(within):
            raise LyapunovPruneError(
                f"nothing fits in {self.max_kl:g} nats a token: {self.method} with {self.unit} {self.amounts[0]:g}, "
                f"the least it takes, costs {self.kl[0]:.3g}; raise the budget"
            )
        return int(within[-1])

    @property
    def amount(self) -> float:
        """The amount of most compression that was tried and is within the budget. Raises like `chosen`."""
        return float(self.amounts[self.chosen])

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            {self.unit: self.amounts, "kl": self.kl, "flipped": self.flipped, "within": self.kl <= self.max_kl}
        )

    def headline(self) -> str:
        within = (self.kl <= self.max_kl).any()
        most = f"{self.unit} {self.amount:g} is the most tried" if within else "nothing tried is"
        told = f"{self.method}, {self.schedule}: {most} within {self.max_kl:g} nats a token"
        return f"{told}, measured on the windows that chose it\n{self.measured_on.line()}"


@runs_model
def compress_under_budget(
    model: Plain,
    batch: Readable,
    max_kl: Positive,
    *,
    method: str,
    allocation: str = "uniform",
    schedule_options: Mapping[str, Any] | None = None,
    group_size: int | None = None,
    symmetric: bool = False,
    weighted: bool = False,
    correction: Share = 0.0,
    batch_size: Count = 1,
    folder: str | Path | None = None,
) -> tuple[BudgetedCompression, Compressed]:
    """Compress by `method` as much as possible while `KL(p‖q)` on `batch` is at most `max_kl` nats per token.

    Returns the amounts tried by a bisection, and the model compressed by the chosen one; `model` is not changed.

    The amount is a sparsity from 0.01 to 0.99 in hundredths (for low-rank methods, of the parameters), or 8 to 2 bits
    for methods that round. There are about seven trials; each takes one compression and one forward of the compressed
    model. Three of four windows calibrate the method, and the divergence is measured on the others (`apart`), which
    choose the amount. With a `folder` finished trials are kept, but not their models: the chosen one is compressed once
    more if an earlier run tried it. Memory: two copies of the model (the best and the current trial), the dense final
    states, and a block of positions × vocabulary.

    Raises NonFiniteError naming the layer when the dense model is not finite, and LyapunovPruneError when `max_kl` is
    not a number above 0 or nothing is within it, for a schedule of bits, for logits that are not a function of the
    final state, and like `compress`.
    """
    unit = require_spendable(method, allocation)
    options = dict(schedule_options or {})
    require_options(allocation, options)
    calibrating, reading = apart(read(model, batch), of=4, most=None)
    dense: dict[int, torch.Tensor] = {}  # of the windows that this process compares

    def keep(first: int, ids: torch.Tensor) -> None:
        dense[first] = _final(reading, ids)

    dealt(reading, batch_size, keep, "dense states")
    on, by = reading.measured_on(), calibrating.measured_on()
    how: dict[str, Any] = {"method": method, "group_size": group_size, "symmetric": symmetric}
    how |= {"weighted": weighted, "correction": correction}
    about = on.key | how | {"calibrated on": by.text_hash, "schedule": allocation, "options": encode(options)}
    levels, refused = _LEVELS[unit], dict[float, LyapunovPruneError]()
    best: dict[float, Compressed] = {}  # the last trial of this run within the budget
    with Store(folder, "compression budget", about) as store:

        def compressed(level: float) -> Compressed:
            return compress(
                model,
                calibrating,
                sparsity=level if unit == "sparsity" else None,
                bits=level if unit == "bits" else None,
                allocation=allocation,
                schedule_options=options,
                batch_size=batch_size,
                **how,
            )

        def fits(level: float) -> bool:
            key, trial = f"{level:g}", dict[float, Compressed]()
            if key not in store:
                try:
                    trial[level] = compressed(level)
                except LyapunovPruneError as error:  # the method or the schedule cannot meet this amount
                    refused[level] = error
                    return False
                store.add(key, _moved(reading, dense, trial[level].model, batch_size))
            kl = store[key][0]
            if kl is None or kl > max_kl:
                return False
            best.clear()
            best.update(trial)
            return True

        _bisect(levels, fits)
        if levels[0] in refused:
            raise refused[levels[0]]
        costs = {level: [None, None] if level in refused else store.items().get(f"{level:g}") for level in levels}
        spent = BudgetedCompression(method, allocation, unit, *_arrays(costs), float(max_kl), on, by)
        return spent, _seen(best.get(spent.amount) or compressed(spent.amount), model.model, on)


def _arrays(costs: Mapping[float, Sequence[float | None] | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The amounts with a cost, and their two costs, (n,) float64 each; a None inside a cost becomes NaN."""
    tried = {level: cost for level, cost in costs.items() if cost is not None}
    kl, flipped = np.array(list(tried.values()), dtype=np.float64).T.copy()
    return np.array(list(tried)), kl, flipped


def _bisect(levels: Sequence[float], fits: Callable[[float], bool]) -> None:
    """Ask whether a level fits, until the last one that does and the first one that does not are neighbours."""
    within, over = -1, len(levels)
    while over - within > 1:
        middle = (within + over) // 2
        if fits(levels[middle]):
            within = middle
        else:
            over = middle


def _seen(small: Compressed, model: PreTrainedModel, on: MeasuredOn) -> Compressed:
    """`small`, with the text that decided the amount added to its allocation and its history."""
    allocation = replace(small.report.allocation, measured_on=(*small.report.allocation.measured_on, on))
    report = replace(small.report, allocation=allocation)
    add_step(small.model, "compress", report.saw, model)
    return Compressed(small.model, report)


def _final(reading: Reading, ids: torch.Tensor) -> torch.Tensor:
    """The dense final state of every position that predicts, positions × width."""
    state = final_state(reading.structure, ids)
    require_finite_states(reading, ids, state)
    return predicting(state)


def _moved(
    reading: Reading, dense: Mapping[int, torch.Tensor], small: PreTrainedModel, batch_size: int
) -> list[float | None]:
    """Means of `KL(p‖q)` and of the flips; None if not finite.

    The head of `small` is the dense one, which `compress` does not change.
    """
    structure = find_structure(small)

    def moved(first: int, ids: torch.Tensor) -> torch.Tensor:
        changed = predicting(final_state(structure, ids))
        _, kl, _, flipped, _ = measures(reading.scorer, dense[first], [changed], 1.0)[0].sum(-1).cpu()
        return torch.stack([kl, flipped])

    sums = reduce(torch.add, dealt(reading, batch_size, moved, "divergence"))
    means = sums / (reading.batch.tokens - len(reading.batch))
    return [x if math.isfinite(x) else None for x in means.tolist()]
