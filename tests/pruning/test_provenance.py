"""A provenance knows the model that layers left, by its depth, settings and weights."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import make_tiny

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.pruning.gate import GateReport
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance
from lyapunov_prune.results.result import versions


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 5}, {"seed": 1}, {"rms_norm_eps": 0.5}])
def test_another_model_than_the_dense_one_is_refused(changes: dict[str, Any]) -> None:
    model = make_tiny("llama")
    plan = PruningPlan.given(model, [1])
    made = Provenance("org/dense", plan.kept, plan, GateReport(()), versions())
    made.require_dense(model, "dense", "out", "DENSE")
    with pytest.raises(LyapunovPruneError, match="'org/dense'"):
        made.require_dense(make_tiny("llama", **changes), "dense", "out", "DENSE")
