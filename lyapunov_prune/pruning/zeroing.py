"""Remove the attention or MLP of a layer in a plain checkpoint, by setting its output projection to zero.

A plain transformers checkpoint cannot say that a layer lacks its attention or its MLP. With a zero output projection
the sublayer adds nothing to the residual stream, which computes the same. The zeros are stored and multiplied like any
weight, so this shows what a sublayer is worth but saves no time or memory. In a compact checkpoint attentions are gone
(`export.compact`).
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
    """Set the output projections of these sublayers of `decoder` to zero, in place: weight, bias, every expert.

    Trial forwards find which matrices they are (`forward.outputs`). Raises LyapunovPruneError if a layer has no such
    sublayer, if something after the projection adds to the output (a norm with a bias), and if another layer uses the
    same matrix.
    """
    if not (attention or mlp):
        return
    for index, kind, branch in named_branches(decoder, attention, mlp):
        needed = zero_outputs(branch)
        why = next(filter(None, (_shared(decoder.model, parameter) for parameter in needed or ())), None)
        if needed is None:
            why = (
                f"a {type(branch.exit).__name__} that adds a bias or the residual stream, which zeroing the output "
                "projection does not remove"
            )
        if why:
            raise LyapunovPruneError(f"the {kind} of layer {index} ends in {why}; remove the whole layer")


def _shared(model: PreTrainedModel, parameter: nn.Parameter) -> str | None:
    """The first two names of a parameter, if it has several."""
    users = [name for name, p in model.named_parameters(remove_duplicate=False) if p.data_ptr() == parameter.data_ptr()]
    return f"{users[0]}, which is also {users[1]}" if len(users) > 1 else None
