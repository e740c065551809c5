"""How far an error at the output of a matrix moves the prediction, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lyapunov_prune.arguments import Count
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.dealing import shared_out
from lyapunov_prune.forward.decoding import drawn, draws_of
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.forward.products import Product, watched_products
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.linalg import token_energy
from lyapunov_prune.models.experts import Routing
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.streamed import require_not_streamed


def token_weights(
    reading: Reading, projections: Sequence[Projection], batch_size: Count = 1
) -> dict[str, list[torch.Tensor]]:
    """`‖∂ℓ/∂y_t‖²` at the output `y_t` of every product, scaled to mean 1 over its tokens: (tokens,) float64 per call.

    The experts of a router share one output, their sum, so that a token has a weight whichever experts the compressed
    model sends it to.

    `ℓ = −Σ_s log p_s(v_s)` over all positions s, with `v_s ~ p_s` drawn from the model's own prediction. The
    expectation over draws is thus the trace of the Fisher information at `y_t`, the second derivative of `KL(p‖q)` with
    respect to an error there. Takes one draw per position (seeded by the window), one forward and one backward; weights
    are unchanged.

    Raises LyapunovPruneError for a streamed model, and for gradients that are zero or not finite.
    """
    model = reading.model
    require_not_streamed(model)  # a backward pass runs through all layers
    outputs: list[tuple[str, torch.Tensor, bool]] = []
    found: dict[str, list[torch.Tensor]] = {}

    def note(name: str, output: torch.Tensor, rows_are_features: bool = False) -> None:
        outputs.append((name, output if output.requires_grad else output.requires_grad_(), rows_are_features))

    def seen(product: Product) -> None:
        if product.routed is None:
            note(product.name, product.output, product.rows_are_features)

    def leave(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if Routing.of(args, kwargs) is not None:
            note(name, output)

    experts = {p.routed for p in projections if p.routed}
    leaving = [(model.get_submodule(name), partial(leave, name)) for name in experts]

    def weigh(part: tuple[int, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        number, ids = part
        with torch.enable_grad(), watched_products(model, projections, seen), hooked(after=leaving):
            loss = _drawn_loss(uncached_logits(model, ids).float(), number * batch_size)
        gradients = torch.autograd.grad(loss, [y for _, y, _ in outputs], allow_unused=True)
        here: dict[str, list[torch.Tensor]] = {}
        for (name, y, rows_are_features), gradient in zip(outputs, gradients, strict=True):
            g = torch.zeros_like(y) if gradient is None else gradient
            energy = token_energy(g.transpose(-1, -2) if rows_are_features else g)
            here.setdefault(name, []).append(energy.flatten().cpu())
        outputs.clear()
        return here

    windows = list(enumerate(reading.windows(batch_size)))  # of the size that `stream` asks the weights of
    for here in shared_out(reading, windows, weigh, "weights of tokens"):
        for name, calls in here.items():
            found.setdefault(name, []).extend(calls)
    return {name: _normalised(name, calls) for name, calls in found.items()}


def _drawn_loss(logits: torch.Tensor, first: int) -> torch.Tensor:
    """`−Σ log p(v)` over positions, `v ~ p`; `logits`: windows × tokens × vocabulary, from window `first` on."""
    count, tokens, _ = logits.shape
    draws = draws_of(0, range(first, first + count), tokens)
    labels = [drawn(u.unsqueeze(1))(0, z.detach()).to(z.device) for u, z in zip(draws, logits, strict=True)]
    return -logits.log_softmax(-1).gather(-1, torch.stack(labels)).sum()


def _normalised(name: str, calls: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    mean = float(torch.cat(list(calls)).mean())
    if not 0 < mean < float("inf"):
        raise LyapunovPruneError(
            f"the gradient of the loss at the output of {name} is {mean:g}; tokens cannot be weighted by it"
        )
    return [energy / mean for energy in calls]
