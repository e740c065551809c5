"""Tokens for experts that get too few: the first tokens of the layer, whichever experts they went to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lyapunov_prune.models.experts import Routing
from lyapunov_prune.models.hooked import hooked

_AT_ONCE = 16  # experts that run on lent tokens in one forward


class Lender:
    """The first `size` tokens that enter `module`, which holds experts, with what is needed to run an expert on them.

    A lent token has the root mean square of the router's weights in the layer; its own weight, if tokens are weighted
    (`energy`); and the gradient at the module's output, if gradients are gathered. Nothing is stored if the router acts
    outside the module (Llama 4, JetMoE).
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        self.module, self.size = module, size
        self.tokens: list[torch.Tensor] = []
        self.energies: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.output: torch.Tensor | None = None  # of the last call with stored tokens, if gradients are gathered
        self.energy: torch.Tensor | None = None  # of the tokens of the current call
        self._like = torch.zeros(0)  # empty, with dtype and device of the router's weights
        self._squares, self._choices = 0.0, 0

    @contextmanager
    def watching(self, energies: Iterator[torch.Tensor] | None) -> Iterator[None]:
        """Store tokens of the forwards inside the block; `energies` yields the weights of the tokens of each call."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            routing = Routing.of(args, kwargs)
            if routing is None:
                return
            self.energy = None if energies is None else next(energies)
            self._like = routing.weights[:0]
            self._squares += float(routing.weights.detach().double().square().sum())
            self._choices += routing.weights.numel()
            missing = self.size - sum(map(len, self.tokens))
            self.tokens.append(routing.tokens[:missing].detach().clone())
            if self.energy is not None:
                self.energies.append(self.energy[:missing])

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.output = output if torch.is_grad_enabled() and self.tokens and len(self.tokens[-1]) else None

        with hooked(before=[(self.module, before)], after=[(self.module, after)]):
            yield

    def keep_gradient(self, gradient: torch.Tensor | None) -> None:
        """Store the gradient at `output` for the stored tokens of that call."""
        assert self.output is not None
        g = torch.zeros_like(self.output) if gradient is None else gradient
        self.gradients.append(g.reshape(-1, g.shape[-1])[: len(self.tokens[-1])])

    def outputs(self, missing: Mapping[int, int]) -> Iterator[torch.Tensor]:
        """The outputs of experts for the first tokens, as many as `missing` gives, by the module's own forward.

        Experts run in groups, since a forward allocates (experts in the group) × (all experts) × tokens.
        """
        kept, energies = torch.cat(self.tokens), torch.cat(self.energies) if self.energies else None
        weight = (self._squares / max(1, self._choices)) ** 0.5
        every = list(missing)
        for part in (every[i : i + _AT_ONCE] for i in range(0, len(every), _AT_ONCE)):
            counts = torch.tensor([missing[expert] for expert in part], device=kept.device)
            tokens = kept[: int(counts.max())]
            self.energy = None if energies is None else energies[: len(tokens)]
            chosen = torch.tensor(part, device=kept.device).expand(len(tokens), -1)
            sent = torch.arange(len(tokens), device=kept.device).unsqueeze(1) < counts
            weights = sent.to(self._like) * weight
            if len(part) == 1:  # plus one of weight 0: LongCat's forward rejects a single choice
                chosen, weights = chosen.repeat(1, 2), torch.cat([weights, torch.zeros_like(weights)], 1)
            output: torch.Tensor = self.module(tokens, chosen.contiguous(), weights)
            yield output.reshape(len(tokens), -1)
