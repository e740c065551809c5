"""The control of the gate: what it asks of a pruned model, asked of one as it came."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.reloading import RELOADED, reload_check
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.pruning.gate import CACHED, GateReport, attempt, cache_check, crashed, saved_in, seen_by


@in_eval_mode
@torch.no_grad()
def verify_intact(model: PreTrainedModel, batch: TokenBatch | torch.Tensor | None = None) -> GateReport:
    """A removal from a model that fails its own control cannot be checked."""
    inputs = sample_inputs(wrap(model), batch)
    checks = [attempt(CACHED, lambda: cache_check(model, model, inputs))]
    try:
        with saved_in(model, None) as folder:
            checks.append(attempt(RELOADED, lambda: reload_check(model, folder, inputs)))
    except Exception as error:
        checks.append(crashed(RELOADED, error))
    return GateReport(tuple(checks), seen_by(model, batch, inputs))
