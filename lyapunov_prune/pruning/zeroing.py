"""Remove the attention or MLP of a layer in a plain checkpoint, by setting its output projection to zero.

A plain transformers checkpoint cannot say that a layer lacks its attention or its MLP. With a zero output projection
the sublayer adds nothing to the residual stream, which computes the same. The zeros are stored and multiplied like any
weight, so this shows what a sublayer is worth but saves no time or memory. In a compact checkpoint attentions are gone
(`export.compact`).
"""

from __future__ import annotations

from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.outputs import zero_outputs
from lyapunov_prune.forward.sublayers import find_sublayers, named_branches
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.structure import in_eval_mode


@in_eval_mode
def zero_sublayers(decoder: Decoder, attention: tuple[int, ...], mlp: tuple[int, ...]) -> None:
    """Set the output projections of these sublayers of `decoder` to zero: weight, bias, every expert.

    Trial forwards find which matrices they are (`forward.outputs`). Raises LyapunovPruneError if a layer has no such
    sublayer, if something after the projection adds to the output (a norm with a bias), and if another layer uses the
    same matrix.
    """
    if not (attention or mlp):
        return
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in decoder.model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    sublayers = find_sublayers(decoder, sorted({*attention, *mlp}))
    for index, kind, branch in named_branches(sublayers, attention, mlp):
        needed = zero_outputs(branch)
        shared = (users[parameter] for parameter in needed or () if len(users[parameter]) > 1)
        why = next((f"{names[0]}, which is also {names[1]}" for names in shared), None)
        if needed is None:
            why = (
                f"a {type(branch.exit).__name__} that adds a bias or the residual stream, which zeroing the output "
                "projection does not remove"
            )
        if why:
            raise LyapunovPruneError(f"the {kind} of layer {index} ends in {why}; remove the whole layer")
