"""Hidden channels and experts masked inside a block: the reference for a model without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lyapunov_prune.forward.replacement import replaced
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import hooked, overridden
from lyapunov_prune.models.mixtures import Mixture
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.units import Refits


@contextmanager
def masked(
    decoder: Decoder, kept: Mapping[int, Sequence[torch.Tensor | None]], refits: Refits | None = None
) -> Iterator[None]:
    """Inside the block, the columns of last matrices are zero for all hidden channels except those in `kept`.

    `kept` has the channels of each unit by layer, None if all stay. `refits` replace the other columns, if given; a
    layer's index there is that among the layers of `kept`. The matrices of a layer are replaced while it runs, so this
    takes the memory of one layer's.
    """
    before: list[tuple[nn.Module, Callable[..., None]]] = []
    after: list[tuple[nn.Module, Callable[..., None]]] = []
    with ExitStack() as stack:
        for i, (layer, here) in enumerate(kept.items()):
            lasts = {
                unit.out: (channels, (refits or {}).get((i, j)))
                for j, (unit, channels) in enumerate(zip(decoder.units[layer], here, strict=True))
                if channels is not None
            }
            running = stack.enter_context(ExitStack())  # the replacement of this layer's matrices
            before.append((decoder.layers[layer], partial(_mask_columns, running, decoder, lasts)))
            after.append((decoder.layers[layer], lambda *_, running=running: running.close()))
        stack.enter_context(hooked(before=before, after=after))
        yield


def _mask_columns(
    running: ExitStack, decoder: Decoder, lasts: Mapping[Projection, tuple[torch.Tensor, torch.Tensor | None]], *_: Any
) -> None:
    weights = {}
    for p, (channels, refit) in lasts.items():
        W = p.weight(decoder.model)
        index = channels.to(W.device)
        weights[p] = torch.zeros_like(W).index_copy(1, index, W[:, index] if refit is None else refit.to(W))
    running.enter_context(replaced(decoder.model, weights))


class _Masked(TorchFunctionMode):
    """Products with the router's matrix `scores` get −∞ in the columns `gone`."""

    def __init__(self, scores: torch.Tensor, gone: torch.Tensor) -> None:
        super().__init__()
        self.scores, self.gone = scores, gone

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            weight = args[1] if len(args) > 1 else (kwargs or {})["weight"]  # may be a copy in another dtype
            if weight.shape == self.scores.shape and torch.equal(weight, self.scores.to(weight.dtype)):
                return output.index_fill(-1, self.gone.to(output.device), -torch.inf)
        return output


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

    stack.enter_context(overridden(block, masked))


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
