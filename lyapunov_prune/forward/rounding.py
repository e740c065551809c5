"""Where the layers of a model are not smooth: the coarsest rounding in them, and whether they select by value.

transformers computes RMSNorm and the softmax of eager attention in float32 even in a float64 model, so such a layer
keeps 24 bits of the state instead of 53. A family without casts (GPT-2) keeps them all. A mixture of experts sends a
token to the experts with the largest scores, and sparse attention reads the tokens with the largest scores, so a tiny
change across a tie makes the output jump. Both are detected from the operations of a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lyapunov_prune.forward.hooks import residual_stream, run_backbone
from lyapunov_prune.models.structure import Structure

# The operations of a layer do not depend on the text, so few tokens suffice.
_TOKENS = 8
# Operations that select the largest of several values.
_aten = torch.ops.aten
_CHOICES = frozenset({_aten.topk.default, _aten.argmax.default, _aten.sort.default, _aten.max.dim})


class Roughness(NamedTuple):
    """The coarsest dtype that the layers round to, and whether any of them selects by value."""

    coarsest: torch.dtype
    chooses: bool


def roughness(structure: Structure, ids: torch.Tensor, dtype: torch.dtype) -> Roughness:
    """The coarsest dtype that operations inside the layers round to, at least `dtype`, and whether one selects.

    An operation rounds if it returns floats of a coarser dtype than one of its inputs, and selects if it finds the
    largest values. Everything outside the layers (rotary angles, masks) is the same for a clean and a disturbed state.
    Casts inside a fused kernel are not seen. Costs one forward of 8 tokens of `ids` (windows × tokens).
    """
    seen = _Operations(dtype)
    with ExitStack() as inside:

        def visit(layer: int, hidden: torch.Tensor) -> None:
            if layer == 0:
                inside.enter_context(seen)
            elif layer == structure.num_layers:
                inside.close()

        with residual_stream(structure, visit):
            run_backbone(structure, ids[:1, :_TOKENS])
    return Roughness(seen.coarsest, seen.chooses)


class _Operations(TorchDispatchMode):
    """Watches every operation inside the block; `coarsest` is the coarsest dtype that any rounded to."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.coarsest = dtype
        self.chooses = False

    def __torch_dispatch__(
        self, operation: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = operation(*args, **(kwargs or {}))
        finest = min(map(_unit, _floats((args, kwargs))), default=torch.inf)
        rounded = [dtype for dtype in _floats(output) if _unit(dtype) > finest]
        self.coarsest = max([self.coarsest, *rounded], key=_unit)
        self.chooses |= operation in _CHOICES
        return output


def _floats(values: Any) -> list[torch.dtype]:
    return [x.dtype for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
