"""Where the layers of a model are not smooth: the coarsest rounding that they do, and whether they choose.

transformers takes RMSNorm in float32, and eager attention its softmax, in a float64 model too: what such a layer makes
of the state has 24 bits, not 53. A family that casts nothing (GPT-2) keeps them all. A mixture of experts sends a token
to those of the largest scores, and sparse attention looks at the tokens of the largest: a state that moves by however
little across a tie jumps. So both are looked up in the operations of a forward, and not assumed of a family.
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

# Enough for every kind of layer to do what it does; which operations a layer is made of does not depend on the text.
_TOKENS = 8
# They tell which of several values are largest.
_aten = torch.ops.aten
_CHOICES = frozenset({_aten.topk.default, _aten.argmax.default, _aten.sort.default, _aten.max.dim})


class Roughness(NamedTuple):
    """The dtype of largest unit that the layers round to, and whether something in them is chosen by its value."""

    coarsest: torch.dtype
    chooses: bool


def roughness(structure: Structure, ids: torch.Tensor, dtype: torch.dtype) -> Roughness:
    """What the operations inside the layers round to, `dtype` itself included, and whether one chooses.

    An operation rounds when it returns floats of a larger unit than one that it was given, and chooses when it tells
    which values are largest. What stands outside the layers (rotary angles, masks) is the same for a clean and a
    disturbed state and leaves no difference. Casts inside a fused kernel are not seen. Costs one forward of 8 tokens of
    `ids` (windows × tokens).
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
    """Every operation inside the block is looked at; `coarsest` is the dtype of largest unit that one rounded to."""

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
