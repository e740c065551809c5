"""ATP: sparsities in arithmetic progression, with the first layer the densest."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import SPARSEST, Allocation, Matrices, require_sparsity
from lyapunov_prune.allocation.fitting import shift
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.progress import track
from lyapunov_prune.results.result import MeasuredOn


@runtime_checkable  # `allocate` is `checked`
class Score(Protocol):
    """The loss of the model under an allocation, and the text it is measured on."""

    @property
    def measured_on(self) -> MeasuredOn: ...

    def __call__(self, allocation: Allocation) -> float:
        """Mean loss in nats, smaller is better; infinite or NaN for a broken model."""


def steepest(budget: float, num_layers: int) -> float:
    """The largest common difference: `min(2S, 2(1 − S)) / (L − 1)`, where an end reaches 0 or 1; 0 for one layer."""
    return min(2 * budget, 2 * (1 - budget)) / (num_layers - 1) if num_layers > 1 else 0.0


def atp(model: PreTrainedModel, budget: float, *, beta: float | None = None) -> Allocation:
    """`s_l = S − β (L − 1) / 2 + β l` for `l = 0 … L − 1`, `S` the budget, `0 ≤ β ≤ min(2S, 2(1 − S)) / (L − 1)`.

    Huang et al., Determining layer-wise sparsity for large language models through a theoretical perspective (ICML
    2025, arXiv:2502.14770). The paper searches for the β of lowest perplexity (`atp_search`); the default here is half
    of the largest β, which no experiment supports. Layers of unequal size are shifted together until the mean is the
    budget, and none exceeds 0.99.

    Raises LyapunovPruneError for β outside its range and a budget outside `0 … 0.99`.
    """
    require_sparsity(budget)
    matrices = Matrices.of(model)
    L = matrices.model.num_layers
    largest = steepest(budget, L)
    beta = largest / 2 if beta is None else beta
    if not 0 <= beta <= largest:
        raise LyapunovPruneError(f"beta {beta:g} is outside 0 to {largest:.6g}, where sparsities of 0 to 1 end")
    target = budget - beta * (L - 1) / 2 + beta * matrices.layers
    amount = shift(target, matrices.sizes, budget, high=SPARSEST)
    return matrices.allocated("atp", budget, amount, {"beta": beta})


def atp_search(model: PreTrainedModel, budget: float, score: Score, *, trials: int = 9) -> Allocation:
    """`atp` at the β of least `score` among `β_k = k/T · min(2S, 2(1 − S)) / (L − 1)`, `k = 1 … T`, T the `trials`.

    The search of Huang et al. (see `atp`), reimplemented from its description: a grid on `0 < β ≤ largest`, scored by
    perplexity. The smaller β wins a tie. Costs one compression and one scoring per trial. `tried` of the result holds
    every β with its score.

    Raises LyapunovPruneError unless `trials` is a positive integer, when no trial has a finite loss, and like `atp`.
    """
    require_sparsity(budget)
    if not (trials >= 1 and trials % 1 == 0):
        raise LyapunovPruneError(f"trials is {trials:g}; give 1 or more")
    largest = steepest(budget, Matrices.of(model).model.num_layers)
    grid = np.unique(np.linspace(0, largest, int(trials) + 1)[1:])  # a single β where only 0 is possible
    candidates = [atp(model, budget, beta=float(beta)) for beta in grid]
    losses = np.array([score(allocation) for allocation in track(candidates, "search of beta")])
    if not np.isfinite(losses).any():
        raise LyapunovPruneError(f"no trial of the search at sparsity {budget:g} left a finite loss; give a lower one")
    best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    return replace(
        candidates[best],
        schedule="atp-search",
        parameters={"trials": float(trials), **candidates[best].parameters},
        measured_on=(score.measured_on,),
        tried=tuple(zip(grid.tolist(), losses.tolist(), strict=True)),
    )
