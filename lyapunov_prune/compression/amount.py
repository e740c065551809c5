"""How much a method may take of every matrix until the prediction has moved as far as it may."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.arguments import Positive, Share
from lyapunov_prune.compression.compress import Compressed, compress
from lyapunov_prune.compression.recipe import require_amount, require_options
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.forward.states import predicting, require_finite_states
from lyapunov_prune.models.decoder import takes_model
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.models.structure import find_structure, in_eval_mode
from lyapunov_prune.predictions.tiles import measures
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.history import add_step
from lyapunov_prune.results.result import MeasuredOn, Result, encode
from lyapunov_prune.results.store import Store

# From the least that is taken to the most.
_LEVELS = {"sparsity": tuple(n / 100 for n in range(1, 100)), "bits": tuple(float(n) for n in range(8, 1, -1))}


@dataclass(frozen=True)
class BudgetedCompression(Result):
    """The amounts of `method` that a bisection tried, from the least taken to the most, and what each cost.

    (n,) float64, means over every position of a window but its last, with `p` of the dense model and `q` of the
    compressed: `kl = KL(p‖q)` in nats a token, `flipped` the share of positions whose likeliest token is another one.
    NaN where the method or the schedule cannot meet the amount. The method calibrated by other windows
    (`calibrated_on`) than the costs were `measured_on`. `unit`: sparsity, by hundredths, or bits. Between tried
    amounts the cost is taken to rise: where it does not, more than `amount` may be within `max_kl` too.
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
        """Which of the tried takes the most within the budget; raises LyapunovPruneError where none is within."""
        within = np.flatnonzero(self.kl <= self.max_kl)  # NaN is over any budget
        if not len(within):
            raise LyapunovPruneError(
                f"nothing fits in {self.max_kl:g} nats a token: {self.method} with {self.unit} {self.amounts[0]:g}, "
                f"the least it takes, costs {self.kl[0]:.3g}; raise the budget"
            )
        return int(within[-1])

    @property
    def amount(self) -> float:
        """The most that was tried and is within the budget. Raises as `chosen`."""
        return float(self.amounts[self.chosen])

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            {self.unit: self.amounts, "kl": self.kl, "flipped": self.flipped, "within": self.kl <= self.max_kl}
        )

    def headline(self) -> str:
        within = (self.kl <= self.max_kl).any()
        most = f"{self.unit} {self.amount:g} is the most tried" if within else "nothing tried is"
        return f"{self.method}, {self.schedule}: {most} within {self.max_kl:g} nats a token\n{self.measured_on.line()}"


def require_spendable(method: str, allocation: Any, **said: Any) -> str:
    """The unit that a budget is spent in; LyapunovPruneError where it is said already, or cannot be, how much goes."""
    if given := [name for name, value in said.items() if value is not None]:
        raise LyapunovPruneError(f"--max-kl says how much goes; leave out --{given[0]}")
    if not isinstance(allocation, str):
        raise LyapunovPruneError("the allocation says how much of every matrix; name a schedule with --max-kl")
    if allocation in SCHEDULES and SCHEDULES[allocation].unit == "bits":
        raise LyapunovPruneError(f"allocation {allocation} has few means to choose among; give --max-kl with uniform")
    unit = "bits" if method in METHODS and METHODS[method].unit == "bits" else "sparsity"
    require_amount(method, 0.5 if unit == "sparsity" else None, None, 4 if unit == "bits" else None, allocation)
    return unit


@takes_model
@in_eval_mode
@torch.no_grad()
def compress_under_budget(
    model: Plain,
    batch: Readable,
    max_kl: Positive,
    *,
    method: str,
    allocation: str = "uniform",
    profile: ContractionProfile | None = None,
    schedule_options: Mapping[str, Any] | None = None,
    group_size: int | None = None,
    symmetric: bool = False,
    weighted: bool = False,
    correction: Share = 0.0,
    batch_size: int = 1,
    folder: str | Path | None = None,
    resume: bool = False,
) -> tuple[BudgetedCompression, Compressed]:
    """Bisect for the most that `compress` may take by `method` until `KL(p‖q)` on `batch` exceeds `max_kl`.

    Returns what was tried, and the model compressed by the chosen amount.

    The amount is a sparsity from 0.01 to 0.99 by hundredths, for low rank of the parameters, or for methods that round
    8 to 2 bits. A trial is one compression, about seven of them, and a forward of the compressed model. The method
    calibrates by three of four windows, and the divergence is measured on the fourth, which the method has not seen.
    With a `folder` finished trials are kept; their models are not, so that the chosen one is compressed once more where
    it was tried by an earlier run. Memory: two copies of the model (the best trial and the one at work), the dense
    final states, and a block of positions × vocabulary. The model is untouched.

    Raises NonFiniteError naming the layer when the dense model is not finite, and LyapunovPruneError when `max_kl` is
    not a number above 0, when nothing is within it, for allocation bits, for logits that are not a function of the
    final state, and as `compress`.
    """
    unit = require_spendable(method, allocation)
    options = dict(schedule_options or {})
    require_options(allocation, options)
    calibrating, reading = apart(read(model, batch), every=4, most=None)
    dense = [_final(reading, ids) for ids in reading.windows(batch_size)]
    on, by = reading.measured_on(), calibrating.measured_on()
    asked = {"calibrated on": by.text_hash, "method": method, "schedule": allocation, "options": encode(options)}
    asked |= {"group size": group_size, "symmetric": symmetric, "weighted": weighted, "correction": correction}
    pooling = profile.pooling if profile is not None else None
    levels, refused = _LEVELS[unit], {}
    with Store(folder, "compression budget", encode(on) | asked | {"pooling": pooling}, resume=resume) as store:

        def compressed(level: float) -> Compressed:
            return compress(
                model,
                calibrating,
                method=method,
                sparsity=level if unit == "sparsity" else None,
                bits=level if unit == "bits" else None,
                allocation=allocation,
                profile=profile,
                schedule_options=options,
                group_size=group_size,
                symmetric=symmetric,
                weighted=weighted,
                correction=correction,
                batch_size=batch_size,
            )

        best: dict[float, Compressed] = {}  # of the trials of this run the last within the budget
        within, over = -1, len(levels)
        while over - within > 1:
            middle = (within + over) // 2
            level, key = levels[middle], f"{levels[middle]:g}"
            trial: dict[float, Compressed] = {}
            if key not in store:
                try:
                    trial[level] = compressed(level)
                except LyapunovPruneError as error:  # an amount beyond what the method or the schedule can meet
                    refused[level] = error
                    over = middle
                    continue
                moved = _moved(reading, dense, trial[level].model, batch_size)
                store.add(key, [x if math.isfinite(x) else None for x in moved])
            kl = store[key][0]
            if kl is not None and kl <= max_kl:
                within, best = middle, trial
            else:
                over = middle
        if levels[0] in refused:
            raise refused[levels[0]]
        tried = [level for level in levels if f"{level:g}" in store or level in refused]
        found = [store[f"{level:g}"] if level not in refused else [None, None] for level in tried]
        costs, flipped = np.array(found, dtype=np.float64).T.copy()  # None is NaN
        spent = BudgetedCompression(method, allocation, unit, np.array(tried), costs, flipped, float(max_kl), on, by)
        return spent, _seen(best.get(spent.amount) or compressed(spent.amount), model.model, on)


def _seen(small: Compressed, model: PreTrainedModel, on: MeasuredOn) -> Compressed:
    """`small`, of whose allocation and history the text is a part that decided how much of `model` goes."""
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
    reading: Reading, dense: Sequence[torch.Tensor], small: PreTrainedModel, batch_size: int
) -> tuple[float, float]:
    """Means of `KL(p‖q)` and of the flips; the head of `small` is that of the dense model, as compress leaves it."""
    structure = find_structure(small)
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    for ids, states in zip(reading.windows(batch_size), dense, strict=True):
        changed = predicting(final_state(structure, ids))
        _, kl, _, flipped, _ = measures(reading.scorer, states, [changed], 1.0)[0].sum(-1).cpu()
        sums += torch.stack([kl, flipped])
        count += len(changed)
    kl, flipped = (sums / count).tolist()
    return kl, flipped
