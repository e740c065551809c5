"""Keep a router from choosing some of its experts, by setting their logits to −∞ inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lyapunov_prune.forward.prefix import restore
from lyapunov_prune.models.mixtures import Mixture, find_mixtures
from lyapunov_prune.models.structure import Structure


class _Masked(TorchFunctionMode):
    """Products with a matrix of `count` rows get −∞ in the columns `gone`."""

    def __init__(self, count: int, gone: torch.Tensor) -> None:
        super().__init__()
        self.count, self.gone = count, gone

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is nn.functional.linear and output.shape[-1] == self.count:
            return output.index_fill(-1, self.gone.to(output.device), -torch.inf)
        return output


@contextmanager
def masked_experts(structure: Structure, experts: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """Inside the block, the routers of the layers in `experts` give these experts a logit of −∞.

    A softmax over all logits is then that over the other experts, and scores computed entry by entry are unchanged for
    them. So the same experts are chosen with the same weights as by a router without these rows. Biases that a router
    adds to its scores before choosing are set to −∞ as well.
    """
    if not any(experts.values()):
        yield
        return
    mixtures = find_mixtures(structure)
    with ExitStack() as stack:
        for index, gone in experts.items():
            if gone:
                layer, mixture = structure.layers[index], mixtures.layers[index]
                _mask(stack, layer, mixture, mixtures.router.experts, torch.tensor(list(gone)))
        yield


def _mask(stack: ExitStack, layer: nn.Module, mixture: Mixture, count: int, gone: torch.Tensor) -> None:
    for name in mixture.stacked:
        path, _, key = name.rpartition(".")
        module = layer.get_submodule(path)
        before = getattr(module, key)
        if before.ndim != 1:
            continue
        after = before.detach().index_fill(0, gone.to(before.device), -torch.inf)
        setattr(module, key, nn.Parameter(after, requires_grad=False) if isinstance(before, nn.Parameter) else after)
        stack.callback(setattr, module, key, before)
    router: Any = layer.get_submodule(mixture.router)
    forward = router.forward

    def masked(*args: Any, **kwargs: Any) -> Any:
        with _Masked(count, gone):
            return forward(*args, **kwargs)

    stack.callback(restore, router, router.__dict__.get("forward"))
    router.forward = masked
