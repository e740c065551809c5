"""Experts that a family keeps as one 3-D parameter: where they are, and which tokens the router sends to each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Families whose experts are stored experts × input × output and whose module does not say so (`is_transposed`).
_TRANSPOSED = ("llama4", "llama4_text")


def expert_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, int]]:
    """The parameters of `module` that hold one matrix for each of its experts: name, parameter, number of experts.

    LongCat's hold rows for experts that do nothing, after those that multiply.
    """
    count: int = getattr(module, "num_routed_experts", getattr(module, "num_experts", 0))
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and len(parameter) in (count, getattr(module, "total_experts", count)):
            yield key, parameter, count


def stored_transposed(module: nn.Module, model_type: str) -> bool:
    """Whether each expert's matrix is stored input × output."""
    return bool(getattr(module, "is_transposed", False)) or model_type in _TRANSPOSED


@dataclass(frozen=True, eq=False)
class Routing:
    """What a module of experts is given: its tokens (T × d), and for each k experts and their weights (T × k)."""

    tokens: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Routing | None:
        """The routing among the arguments of the module; None where the router acts outside it (Llama 4, JetMoE)."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if len(tensors) != 3 or tensors[1].is_floating_point() or tensors[1].shape != tensors[2].shape:
            return None
        tokens, experts, weights = tensors
        return cls(tokens.reshape(-1, tokens.shape[-1]), experts, weights)

    def of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens the expert is given, in the order in which transformers hands them to it, and their weights."""
        choice, rows = torch.where(self.experts.T.eq(expert))
        return rows, self.weights[rows, choice]

    def holds(self, rows: torch.Tensor, x: torch.Tensor) -> bool:
        """Whether `x` are these tokens."""
        return len(rows) == len(x) and torch.equal(self.tokens[rows], x)
