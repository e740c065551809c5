"""Attention or MLP of a layer left out of a plain checkpoint: the output projection of its branch becomes zero.

A plain transformers checkpoint cannot say that a layer lacks its attention or its MLP. It can say the same in
numbers: where the branch's output projection is zero, the branch adds nothing to the residual stream. The zeros
are stored and multiplied like any weight, so this shows what a sublayer is worth and saves no time or memory. In a
compact checkpoint (`compact.py`) attentions are gone.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.outputs import zero_outputs
from lyapunov_prune.forward.sublayers import named_branches
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.structure import in_eval_mode


@in_eval_mode
@torch.no_grad()
def zero_sublayers(decoder: Decoder, attention: tuple[int, ...], mlp: tuple[int, ...]) -> None:
    """Set the output projections of these branches of `decoder` to zero, in place: weight, bias, every expert.

    Which they are is found by trying (`forward.outputs`). Raises LyapunovPruneError for a layer without such a branch,
    for one whose end adds something of its own (a norm with a bias), and when another layer uses the same matrix.
    """
    if not (attention or mlp):
        return
    for index, kind, branch in named_branches(decoder, attention, mlp):
        needed = zero_outputs(branch)
        if needed is None:
            raise LyapunovPruneError(
                f"the {kind} of layer {index} ends in a {type(branch.exit).__name__} that adds something of its own, a "
                "bias or the residual stream, which zeroing the output projection leaves in; remove the whole layer"
            )
        for parameter in needed:
            _require_alone(decoder.model, parameter, index, kind)


def _require_alone(model: PreTrainedModel, parameter: nn.Parameter, index: int, kind: str) -> None:
    users = [name for name, p in model.named_parameters(remove_duplicate=False) if p.data_ptr() == parameter.data_ptr()]
    if len(users) > 1:
        raise LyapunovPruneError(
            f"the {kind} of layer {index} ends in {users[0]}, which is also {users[1]}; remove the whole layer"
        )
