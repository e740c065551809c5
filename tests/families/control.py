"""The control of the gate: what it asks of a pruned model, asked of one as it came."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.reloading import RELOADED
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.examples import as_examples
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.pruning.gate import CACHED, Gate, GateReport


@in_eval_mode
@torch.no_grad()
def verify_intact(model: PreTrainedModel, batch: TokenBatch | torch.Tensor | None = None) -> GateReport:
    """A removal from a model that fails its own control cannot be checked."""
    decoder = wrap(model)
    examples = None if batch is None else as_examples(decoder, batch)
    gate = Gate(decoder, decoder, sample_inputs(decoder, examples), lambda _: nullcontext(), batch=examples)
    return gate.report({CACHED: gate.cached}, {RELOADED: gate.reloads}, None)
