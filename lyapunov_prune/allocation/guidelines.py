"""The rules distilled from sensitivities: early MLP inputs untouched, keys and values first, nothing over a ceiling."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import SPARSEST, Allocation, Matrices, require_sparsity
from lyapunov_prune.allocation.fitting import shift
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.roles import role


def guidelines(
    model: PreTrainedModel, budget: float, *, ceiling: float = 0.9, extra: float = 0.1, protected: int = 2
) -> Allocation:
    """The three rules of structural sensitivity, §6.4 ("Practical compression guidelines").

    1. The matrices that enter the MLP (gate, up) of the first `protected` layers keep every entry.
    2. Keys and values lose `extra` more than the rest.
    3. None loses more than `ceiling`, the catastrophe threshold s* of the model (`measure_sensitivity` finds it).

    All but the protected move together until the mean is the budget. The paper's rules are words; the sizes of
    `extra` and `protected` are ours.

    Raises LyapunovPruneError when the budget lies beyond the ceiling, for a ceiling outside `(0, 0.99]`, a
    negative `extra`, a `protected` that is no count, and for a model in which keys and values, or the matrices into
    the MLPs to protect, are not known by name.
    """
    require_sparsity(budget)
    if not (0 < ceiling <= SPARSEST and extra >= 0 and protected >= 0 and protected % 1 == 0):
        raise LyapunovPruneError(
            f"ceiling {ceiling:g}, extra {extra:g}, protected {protected:g}; give a ceiling of more than 0 and at "
            f"most {SPARSEST:g}, an extra of 0 or more and a number of layers"
        )
    matrices = Matrices.of(model)
    roles = np.array([role(p.component) for p in matrices.projections])
    kept = (roles == "mlp-in") & (matrices.layers < protected)
    first = np.isin(roles, ("key", "value"))
    if not first.any() or (protected and not kept.any()):
        missing = "matrices into its first MLPs" if first.any() else "keys and values"
        raise LyapunovPruneError(f"{matrices.model.name} has no {missing} known by name; use another schedule")
    amount = shift(np.where(first, extra, 0.0), matrices.sizes, budget, high=np.where(kept, 0.0, ceiling))
    parameters = {"ceiling": ceiling, "extra": extra, "protected": protected}
    return matrices.allocated("guidelines", budget, amount, parameters)
