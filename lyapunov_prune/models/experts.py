"""Matrices stored in bare parameters, such as experts, and which tokens a router sends to each expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.families import BARE

# Names in configs and modules for the number of experts, and for the number chosen per token.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
# Names in modules for the number of all that a router scores: experts, and what it scores beside them.
SCORED = ("n_total_experts", "total_experts", "num_router_classes")


def settings_of_experts(config: Any) -> Any:
    """The part of a text config that holds the numbers of experts: DBRX has a config of its own for it."""
    return getattr(config, "ffn_config", config)


def chosen_by(config: Any) -> tuple[int, ...]:
    """The number of experts that each token takes, one per layer if the config has a list; empty if it gives none."""
    told = next((value for name in CHOSEN if (value := getattr(settings_of_experts(config), name, None))), ())
    return tuple(map(int, told)) if isinstance(told, list | tuple) else (int(told),)


def count_of_experts(config: Any) -> int | None:
    """The number of experts of a layer; None if the config gives none."""
    settings = settings_of_experts(config)
    return next((value for name in COUNTS if isinstance(value := getattr(settings, name, None), int)), None)


def require_choosable(config: Any) -> None:
    """Raise LyapunovPruneError if the config has a token take more experts than there are."""
    count = count_of_experts(config)
    chosen = max(chosen_by(config), default=0)
    if count is not None and chosen > count:
        raise LyapunovPruneError(
            f"by its config each token takes {chosen} of {count} experts; correct config.json, or fetch it again"
        )


@dataclass(frozen=True, eq=False)
class Stack:
    """`count` matrices of one size along the first axis of a parameter; 1 if the parameter is one matrix.

    `owner` is the path, relative to the module searched, of the module that holds `parameter` as `key`. `transposed`:
    each matrix is stored input × output. `routed`: a router sends tokens to each of them; otherwise all tokens pass
    through all, each with its own part of their features.
    """

    owner: str
    key: str
    parameter: nn.Parameter
    count: int
    transposed: bool
    routed: bool


def stacks(module: nn.Module, *, transposed: bool = False) -> Iterator[Stack]:
    """The matrices that `module` multiplies by without a module for each: experts, heads, and single ones.

    Experts are 3-D parameters with one entry per expert. LongCat's also have rows for experts that do nothing, after
    those that multiply. `transposed`: the family stores experts input × output although the module does not say so.
    """
    for path, (turned, counted) in BARE.get(type(module).__name__, {}).items():
        owner, _, key = path.rpartition(".")
        parameter = module.get_parameter(path)
        count: Any = getattr(module, counted) if counted else len(parameter) if parameter.ndim == 3 else 1
        yield Stack(owner, key, parameter, count, turned, counted in COUNTS)
    count = getattr(module, "num_routed_experts", getattr(module, "num_experts", 0))
    transposed = transposed or bool(getattr(module, "is_transposed", False))
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and len(parameter) in (count, getattr(module, "total_experts", count)):
            yield Stack("", key, parameter, count, transposed, True)


@dataclass(frozen=True, eq=False)
class Routing:
    """The input of a module of experts: tokens (T × d), and for each token k experts and their weights (T × k)."""

    tokens: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Routing | None:
        """The routing in the module's arguments; None if the router acts outside of it (Llama 4, JetMoE)."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if len(tensors) != 3 or tensors[1].is_floating_point() or tensors[1].shape != tensors[2].shape:
            return None
        tokens, experts, weights = tensors
        return cls(tokens.reshape(-1, tokens.shape[-1]), experts, weights)

    def sent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call of the module, with the experts and weights of this routing in place of their own."""
        own = Routing.of(args, kwargs)
        assert own is not None
        other = {id(own.experts): self.experts, id(own.weights): self.weights}
        return tuple(other.get(id(x), x) for x in args), {key: other.get(id(x), x) for key, x in kwargs.items()}

    def of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices of the tokens that the expert gets, in the order of transformers' forward, and their weights."""
        rows, weights, ends = self._sorted
        start, end = (ends[min(i, len(ends) - 1)] for i in (expert, expert + 1))
        return rows[start:end], weights[start:end]

    @cached_property
    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Token indices and weights of all choices, sorted by expert, and the offset of each expert (and the end)."""
        chosen, weights = self.experts.T.flatten(), self.weights.T.flatten()
        order = chosen.argsort(stable=True)
        return order % len(self.experts), weights[order], [0, *chosen.bincount().cumsum(0).tolist()]

    def holds(self, rows: torch.Tensor, x: torch.Tensor) -> bool:
        """Whether `x` are the tokens `rows`."""
        return len(rows) == len(x) and torch.equal(self.tokens[rows], x)


def unweighted(experts: nn.Module, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The output (T × d), before it is weighted, of one expert for each of the tokens (T × d), `chosen` (T × 1).

    The family's own code returns it for a weight of 1.
    """
    weights = tokens.new_ones(chosen.shape)
    if hasattr(experts, "total_experts"):  # LongCat's forward fails where a token takes one expert
        chosen, weights = chosen.repeat(1, 2), torch.cat([weights, torch.zeros_like(weights)], 1)
    outputs: torch.Tensor = experts.forward(tokens, chosen, weights)
    return outputs.reshape(tokens.shape)
