"""Matrices that a family keeps in bare parameters, and which tokens a router sends to each expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError

# What configs and modules call the number of experts, and the number chosen for a token.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
# Families whose experts are stored experts × input × output and whose module does not say so (`is_transposed`).
_TRANSPOSED = ("llama4", "llama4_text")


def chosen_by(config: Any) -> tuple[int, ...]:
    """How many experts each token takes, by layer where the config has a list; empty where it says nothing."""
    told = next((value for name in CHOSEN if (value := getattr(config, name, None))), ())
    return tuple(map(int, told)) if isinstance(told, list | tuple) else (int(told),)


def require_choosable(config: Any) -> None:
    """Raise LyapunovPruneError where the config has a token take more experts than there are."""
    count = next((value for name in COUNTS if isinstance(value := getattr(config, name, None), int)), None)
    chosen = max(chosen_by(config), default=0)
    if count is not None and chosen > count:
        raise LyapunovPruneError(
            f"by its config each token takes {chosen} of {count} experts; correct config.json, or fetch it again"
        )


@dataclass(frozen=True, eq=False)
class Stack:
    """`count` matrices of one size along the first axis of a parameter; 1 where the parameter is one matrix.

    `owner` is the path of the module that holds `parameter` as `key`, from the module that is asked. `transposed`: each
    matrix is stored input × output. `routed`: a router sends each of them tokens; otherwise all tokens pass all, each
    with its own part of their features.
    """

    owner: str
    key: str
    parameter: nn.Parameter
    count: int
    transposed: bool
    routed: bool


_EXPERTS = "num_experts"
# Class of a module -> path of a parameter that it multiplies by -> whether its matrices are stored transposed, and the
# attribute that counts them where the parameter has no axis for them.
_BARE: dict[str, dict[str, tuple[bool, str]]] = {
    "DbrxExperts": {"mlp.w1": (False, _EXPERTS), "mlp.v1": (False, _EXPERTS), "mlp.w2": (True, _EXPERTS)},
    "DeepseekV4GroupedLinear": {"weight": (False, "n_groups")},
    "InklingRelativeLogits": {"proj": (True, "")},
    "Inkling2RelativeLogits": {"proj": (True, "")},
    "InklingSharedExperts": dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (False, "")),
    "RecurrentGemmaRglru": dict.fromkeys(("input_gate_weight", "recurrent_gate_weight"), (True, "")),
    "ZambaMambaMixer": dict.fromkeys(("x_proj_weight", "dt_proj_weight"), (False, "")),
}


def is_bare(module: nn.Module) -> bool:
    """Whether the module multiplies by parts of its parameters in a way of its own."""
    return type(module).__name__ in _BARE


def stacks(module: nn.Module, model_type: str) -> Iterator[Stack]:
    """The matrices that `module` multiplies by without calling a module for each: experts, heads, and single ones.

    Experts are the parameters of 3 dimensions with an entry for each; LongCat's hold rows for experts that do nothing,
    after those that multiply.
    """
    for path, (transposed, counted) in _BARE.get(type(module).__name__, {}).items():
        owner, _, key = path.rpartition(".")
        parameter = module.get_parameter(path)
        count: Any = getattr(module, counted) if counted else len(parameter) if parameter.ndim == 3 else 1
        yield Stack(owner, key, parameter, count, transposed, counted == _EXPERTS)
    count = getattr(module, "num_routed_experts", getattr(module, "num_experts", 0))
    transposed = bool(getattr(module, "is_transposed", False)) or model_type in _TRANSPOSED
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and len(parameter) in (count, getattr(module, "total_experts", count)):
            yield Stack("", key, parameter, count, transposed, True)


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

    def sent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call of the module, with the experts and weights of this routing in place of their own."""
        own = Routing.of(args, kwargs)
        assert own is not None
        other = {id(own.experts): self.experts, id(own.weights): self.weights}
        return tuple(other.get(id(x), x) for x in args), {key: other.get(id(x), x) for key, x in kwargs.items()}

    def of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens the expert is given, in the order in which transformers hands them to it, and their weights."""
        rows, weights, ends = self._sorted
        start, end = (ends[min(i, len(ends) - 1)] for i in (expert, expert + 1))
        return rows[start:end], weights[start:end]

    @cached_property
    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Rows and weights of all choices, sorted by expert, and where those of each begin and the last ends."""
        chosen, weights = self.experts.T.flatten(), self.weights.T.flatten()
        order = chosen.argsort(stable=True)
        return order % len(self.experts), weights[order], [0, *chosen.bincount().cumsum(0).tolist()]

    def holds(self, rows: torch.Tensor, x: torch.Tensor) -> bool:
        """Whether `x` are these tokens."""
        return len(rows) == len(x) and torch.equal(self.tokens[rows], x)
