"""Reallocation within a layer: every layer keeps its amount, its matrices share it out anew.

Schemes of structural sensitivity, §7, which the paper names and says of all that none helped; the formulas did not
survive, these are ours. Each takes an allocation (uniform, ATP, …) to another of the same mean in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from scipy.stats import rankdata
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import SPARSEST, Allocation
from lyapunov_prune.allocation.fitting import shift
from lyapunov_prune.calibration.norms import input_norms
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.projections import Projection, find_projections
from lyapunov_prune.progress import track
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn


class Regrets(Protocol):
    """Measured regrets: a `Sensitivity` with the study `group` or `component`."""

    @property
    def measured_on(self) -> MeasuredOn: ...

    @property
    def calibrated_on(self) -> MeasuredOn | None: ...

    def of(self, study: str) -> pd.DataFrame: ...


def sensitivity_guided(
    model: PreTrainedModel, allocation: Allocation, regrets: Regrets, *, strength: float = 0.1
) -> Allocation:
    """Sensitivity-guided redistribution: the groups of a layer whose own regret is larger stay denser.

    `s_m = s_l + c_l − strength · u_m`, `u_m` in 0 … 1 the rank of the regret of m's group (study `group`) among those
    of its layer, `c_l` from the layer's amount. Ranks, because regrets lie orders of magnitude apart.

    Raises LyapunovPruneError for a group without a regret, regrets or an allocation of another model, an allocation
    that is not of sparsity, and a strength that is negative.
    """
    rows = regrets.of("group")
    known = {(int(row.layer), row.component): row.regret for row in rows.itertuples()}
    scheme = "sensitivity-guided"
    return _by_regret(model, allocation, regrets, lambda p: known.get((p.layer, p.component)), strength, scheme)


def component_importance(
    model: PreTrainedModel, allocation: Allocation, regrets: Regrets, *, strength: float = 0.1
) -> Allocation:
    """Component-importance reallocation: `sensitivity_guided` by one rank a component, the same in all layers.

    The regret of a component is that of the study `component`, which compresses it in every layer. Raises as
    `sensitivity_guided` does.
    """
    known: Mapping[str, float] = {row.component: row.regret for row in regrets.of("component").itertuples()}
    return _by_regret(model, allocation, regrets, lambda p: known.get(p.component), strength, "component-importance")


def constrained_threshold(
    model: PreTrainedModel, allocation: Allocation, batch: Readable, *, most_off: float = 0.1
) -> Allocation:
    """Constrained global thresholding: of a layer the entries of least Wanda score go, in whichever matrix they are.

    `s_m` is the share of the scores `|W_ij| ‖x_j‖₂` of matrix m below one threshold of its layer, no more than
    `most_off` from the layer's amount; the threshold is where the layer keeps that amount. Costs one forward
    over `batch`.

    Raises LyapunovPruneError for an allocation of another model or not of sparsity, a `most_off` that is negative, and
    for fused experts, whose inputs cannot be seen.
    """
    _require(model, allocation, most_off)
    reading = read(model, batch)
    projections = find_projections(model)
    norms = input_norms(model, reading, projections)

    def amounts(here: Sequence[Projection], sizes: np.ndarray, mean: float) -> np.ndarray:
        scores = [_sorted_scores(p, model, norms[p.name]) for p in here]
        low, high = max(mean - most_off, 0.0), min(mean + most_off, max(SPARSEST, mean))

        def below(limit: float) -> np.ndarray:
            return np.clip([np.searchsorted(s, limit) / len(s) for s in scores], low, high)

        left, right = 0.0, max(float(s[-1]) for s in scores)
        for _ in range(60):  # halved to the last bits of float64
            middle = (left + right) / 2
            left, right = (left, middle) if np.average(below(middle), weights=sizes) >= mean else (middle, right)
        return shift(below(right), sizes, mean, low, high)  # an entry is a step: the rest of it

    parameters, texts = {"most_off": most_off}, (reading.measured_on(),)
    return _within(allocation, projections, amounts, "constrained-threshold", parameters, texts)


def _by_regret(
    model: PreTrainedModel,
    allocation: Allocation,
    regrets: Regrets,
    regret_of: Callable[[Projection], float | None],
    strength: float,
    scheme: str,
) -> Allocation:
    _require(model, allocation, strength)
    if not regrets.measured_on.model.same_as(allocation.model):
        raise LyapunovPruneError(f"the regrets are of {regrets.measured_on.model.name}; measure this model")

    def amounts(here: Sequence[Projection], sizes: np.ndarray, mean: float) -> np.ndarray:
        found = [regret_of(p) for p in here]
        if None in found:
            raise LyapunovPruneError(f"no regret of {here[found.index(None)].name}; run the study for all of the model")
        rank = rankdata(np.nan_to_num(np.array(found, np.float64), nan=np.inf, posinf=np.inf), "dense") - 1
        return shift(mean - strength * rank / max(rank.max(), 1), sizes, mean, high=max(SPARSEST, mean))

    texts = tuple(on for on in (regrets.calibrated_on, regrets.measured_on) if on is not None)
    return _within(allocation, find_projections(model), amounts, scheme, {"strength": strength}, texts)


def _within(
    allocation: Allocation,
    projections: Sequence[Projection],
    amounts: Callable[[Sequence[Projection], np.ndarray, float], np.ndarray],
    scheme: str,
    parameters: Mapping[str, float],
    texts: tuple[MeasuredOn, ...],
) -> Allocation:
    """`amounts` of the matrices of every layer, of the mean that the layer had."""
    layers, sizes = np.array(allocation.layers), np.array(allocation.sizes)
    amount = allocation.amount.copy()
    for layer in track(list(np.unique(layers)), scheme):
        here = np.flatnonzero(layers == layer)
        mean = float(np.average(amount[here], weights=sizes[here]))
        amount[here] = amounts([projections[int(i)] for i in here], sizes[here], mean)
    return replace(
        allocation,
        schedule=f"{allocation.schedule}, {scheme}",
        amount=amount,
        parameters={**allocation.parameters, **parameters},
        measured_on=allocation.measured_on + texts,
    )


def _require(model: PreTrainedModel, allocation: Allocation, most: float) -> None:
    allocation.require_model(model)
    if allocation.unit != "sparsity" or not most >= 0:
        raise LyapunovPruneError(
            f"{most:g} of {allocation.unit}; give an allocation of sparsity and a number of 0 or more"
        )


@torch.no_grad()
def _sorted_scores(p: Projection, model: PreTrainedModel, norms: torch.Tensor) -> np.ndarray:
    W = lift(p.weight(model)).abs()
    return (W * norms.to(W.device)).flatten().sort().values.cpu().numpy()
