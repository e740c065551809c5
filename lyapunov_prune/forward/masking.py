"""Keep a router from choosing some of its experts, by setting their logits to −∞ inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lyapunov_prune.forward.prefix import restore
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.mixtures import Mixture


class _Masked(TorchFunctionMode):
    """Products with the router's matrix `scores` get −∞ in the columns `gone`."""

    def __init__(self, scores: torch.Tensor, gone: torch.Tensor) -> None:
        super().__init__()
        self.scores, self.gone = scores, gone

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is nn.functional.linear and self._by_scores(args[1] if len(args) > 1 else (kwargs or {})["weight"]):
            return output.index_fill(-1, self.gone.to(output.device), -torch.inf)
        return output

    def _by_scores(self, weight: torch.Tensor) -> bool:
        """Whether the weight is the router's matrix, which may be a copy in another dtype."""
        return weight.shape == self.scores.shape and bool(torch.equal(weight, self.scores.to(weight.dtype)))


@contextmanager
def masked_experts(decoder: Decoder, experts: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """Inside the block, the routers of the layers in `experts` give these experts a logit of −∞.

    A softmax over all logits is then that over the other experts, and scores computed entry by entry are unchanged for
    them. So the same experts are chosen with the same weights as by a router without these rows. Biases that a router
    adds to its scores before choosing are set to −∞ as well.
    """
    with ExitStack() as stack:
        for index, gone in experts.items():
            if gone:
                _mask(stack, decoder.layers[index], decoder.mixtures.layers[index], gone)
        yield


def _mask(stack: ExitStack, layer: nn.Module, mixture: Mixture, gone: Sequence[int]) -> None:
    block: Any = layer.get_submodule(mixture.block)
    forward, rows = block.forward, torch.tensor(list(gone))

    def masked(*args: Any, **kwargs: Any) -> Any:  # a streamed layer has its weights while it runs
        with _unchosen(layer, mixture, gone), _Masked(layer.get_parameter(mixture.scores), rows):
            return forward(*args, **kwargs)

    stack.callback(restore, block, block.__dict__.get("forward"))
    block.forward = masked


@contextmanager
def _unchosen(layer: nn.Module, mixture: Mixture, gone: Sequence[int]) -> Iterator[None]:
    """Inside the block, the experts `gone` have −∞ in every tensor with one number an expert."""
    with ExitStack() as stack:
        for stacked in mixture.stacked:
            path, _, key = stacked.name.rpartition(".")
            module = layer.get_submodule(path)
            before = getattr(module, key)
            if before.numel() != stacked.entries:
                continue
            rows = stacked.rows(before, gone).to(before.device)
            after = before.detach().index_fill(stacked.axis, rows, -torch.inf)
            setattr(
                module, key, nn.Parameter(after, requires_grad=False) if isinstance(before, nn.Parameter) else after
            )
            stack.callback(setattr, module, key, before)
        yield
