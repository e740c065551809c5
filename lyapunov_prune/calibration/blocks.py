"""Inputs and hidden vectors of feed-forward blocks while a model runs, and sums over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift, require_numbers
from lyapunov_prune.models.feedforward import FeedForward
from lyapunov_prune.models.hooked import hooked


@dataclass(frozen=True, eq=False)
class Passed:
    """Activations of a block in one forward, each tokens × width, in the model's dtype.

    `x` is the input of the block and `hidden` the input of its last matrix. In a gated block, `gate` is the output of
    the activation and `up` the factor that it is multiplied by.
    """

    x: torch.Tensor
    hidden: torch.Tensor
    gate: torch.Tensor | None
    up: torch.Tensor | None


Visit = Callable[[FeedForward, Passed], None]
Seen = dict[str, torch.Tensor]  # activations of a block that has not ended


def watched_blocks(layers: nn.ModuleList, blocks: Sequence[FeedForward], visit: Visit) -> AbstractContextManager[None]:
    """Call `visit` with every block and its activations, in every forward inside the with block."""
    after: list[tuple[nn.Module, Callable[..., None]]] = []
    before: list[tuple[nn.Module, Callable[..., None]]] = []

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.detach().reshape(-1, x.shape[-1])

    def on_up(block: FeedForward, seen: Seen, module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        seen["x"] = flat(args[0])
        if block.gated:
            seen["up"] = flat(output)[:, block.up.start : block.up.stop]

    def on_gate(seen: Seen, module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        seen["gate"] = flat(output)

    def on_out(block: FeedForward, seen: Seen, module: Any, args: Any, kwargs: Any) -> None:
        hidden = flat(args[0])
        require_numbers(hidden, f"activations in the feed-forward block of layer {block.layer}")
        visit(block, Passed(seen["x"], hidden, seen.get("gate"), seen.get("up")))
        seen.clear()

    for block in blocks:
        layer, seen = layers[block.layer], Seen()
        after.append((layer.get_submodule(block.up.module), partial(on_up, block, seen)))
        if block.gated:
            after.append((layer.get_submodule(block.activation), partial(on_gate, seen)))
        before.append((layer.get_submodule(block.out.module), partial(on_out, block, seen)))
    return hooked(before=before, after=after)


# The sums over tokens that can be requested: name -> sum over one forward, float64.
SUMS: dict[str, Callable[[Passed], torch.Tensor]] = {
    "gate": lambda p: _lifted(p.gate).sum(0),  # Σ g (hidden,)
    "gate_up_up": lambda p: (_lifted(p.gate) * _lifted(p.up).square()).sum(0),  # Σ g u² (hidden,)
    "up_up": lambda p: _lifted(p.up).square().sum(0),  # Σ u² (hidden,)
    "input": lambda p: lift(p.x).sum(0),  # Σ x (d,)
    "hidden": lambda p: lift(p.hidden).sum(0),  # Σ h (hidden,)
    "input_input": lambda p: lift(p.x).T @ lift(p.x),  # Σ x xᵀ (d × d)
    "hidden_input": lambda p: lift(p.hidden).T @ lift(p.x),  # Σ h xᵀ (hidden × d)
}


def _lifted(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None, "a plain block has no gate"
    return lift(x)


@dataclass(frozen=True, eq=False)
class BlockSums:
    """The requested sums of `SUMS` over `tokens` tokens (not means)."""

    tokens: int
    sums: dict[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.sums[name]


def sum_blocks(
    layers: nn.ModuleList, blocks: Sequence[FeedForward], needs: Sequence[str], run: Callable[[], None]
) -> tuple[BlockSums, ...]:
    """For each of `blocks`, the sums `needs` (names of `SUMS`) over all tokens of the forwards in `run()`.

    `run` runs the model on its inputs, text or images. Activations are not kept after their forward. Raises
    LyapunovPruneError for a block that no token reaches, and for activations that are not finite.
    """
    tokens = {block.layer: 0 for block in blocks}
    sums: dict[int, dict[str, torch.Tensor]] = {block.layer: {} for block in blocks}

    def add(block: FeedForward, passed: Passed) -> None:
        tokens[block.layer] += len(passed.x)
        here = sums[block.layer]
        for name in needs:
            more = SUMS[name](passed)
            here[name] = here[name] + more if name in here else more

    with watched_blocks(layers, blocks, add):
        run()
    for layer, count in tokens.items():
        if not count:
            raise LyapunovPruneError(f"layer {layer} took no part in the calibration forward; give more inputs")
    return tuple(BlockSums(tokens[block.layer], sums[block.layer]) for block in blocks)
