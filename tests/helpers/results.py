"""Examples of every result, with NaN and infinities among their numbers."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np

from lyapunov_prune.healing.rounds import Round, Stretch
from lyapunov_prune.mending.report import Gap
from lyapunov_prune.profiles.propagation import Energies
from lyapunov_prune.pruning.removed import ExpertsGone
from lyapunov_prune.ranking.oracle import GreedyStep
from lyapunov_prune.ranking.tried import Final, Tried


def example(kind: Any, floats: Iterator[float]) -> Any:
    """A value of the annotated type, with NaN and infinities among its floats."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if kind == (bool | None) else example(args[0], floats)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        values = {field.name: example(hints[field.name], floats) for field in dataclasses.fields(kind)}
        # A plan does not drop parts of layers that it removes.
        values |= {name: (2, 3) for name in values if name.startswith("drop_")}
        values |= sound(kind.__name__, values, floats)
        return typing.cast(type, kind)(**values)
    if origin is typing.Literal:
        return args[-1]
    if origin is tuple:
        return (0, 1) if args[0] is int else tuple(example(args[0], floats) for _ in range(2))
    if origin is dict:
        return {"a": example(args[1], floats), "b": example(args[1], floats)}
    if kind is np.ndarray:
        return np.array([[next(floats) for _ in range(2)] for _ in range(3)])
    return {int: 5, float: next(floats), str: "ρ “x”\n", bool: True, Any: [8.5, "nan", {"c": None}]}[kind]


def sound(name: str, values: dict[str, Any], floats: Iterator[float]) -> dict[str, Any]:
    """Fields of a result that is checked when it is made, of five layers: no NaN where a number must be."""

    def some(*shape: int, finite: bool = True, most: float = np.inf) -> np.ndarray:
        found = np.minimum(np.abs([next(floats) for _ in range(math.prod(shape))]), most).reshape(shape)
        return np.nan_to_num(found, nan=0.25, posinf=2.0) if finite else found

    def loose(*shape: int) -> np.ndarray:
        return some(*shape, finite=False)

    if name == "ContractionProfile":
        lengths = {"error_growth": 5, "state_growth": 5, "norm_growth": 3, "linearity": 5}
        shares = {field: some(6, finite=False, most=1) for field in ("sink_state_share", "sink_error_share")}
        energies, intervals = (
            {p: make() for p in ("energy", "token")} for make in (lambda: some(6), lambda: loose(5, 2))
        )
        made = {field: loose(length) for field, length in lengths.items()}
        seeds = len(values["seeds"])
        windows = Energies(some(6, 3), some(6, seeds, 3), some(6, seeds, 3))
        kept = {"pooling": "token", "energies": energies, "intervals": intervals, "floor": some(6), "windows": windows}
        return {**kept, **made, **shares}
    if name == "Explanation":
        lengths = {"size": (6,), "error": (6,), "energy": (3, 5), "along": (3, 5), "passed": (5,), "off": (5,)}
        costs = {field: loose(7) for field in ("kl_only", "kl_but", "loss_only", "loss_but")}
        return {field: some(*shape) for field, shape in lengths.items()} | costs | {"rho": loose(5)}
    if name == "TokenKinds":
        return {"positions": some(9), "turned": loose(3, 9), "kl": loose(9), "interval": loose(9, 2)}
    if name == "MatrixErrors":
        return {"error": loose(2), "norm": some(2)}
    if name == "InfluenceProfile":
        return {"influence": some(5), "spread": loose(5), "change": some(5), "windows": some(5, 3)}
    if name == "LayerProfile":
        return {"influence": dataclasses.replace(values["influence"], measured_on=values["contraction"].measured_on)}
    if name == "SublayerInfluence":
        windows = {"windows": {field: loose(5, 3) for field in ("attention", "mlp")}}
        return {field: loose(5) for field in ("attention", "mlp", "attention_spread", "mlp_spread")} | windows
    if name == "Frontier":
        return {field: some(2) for field in ("bytes", "bits", "alike", "best")}
    if name == "SizesTried":
        return {"bytes": some(2), **{field: loose(2) for field in ("ratio", "low", "high")}}
    if name == "Spent":
        return {"bytes": some(2), "cost": some(2), "kl": some(3), "loss": some(2, 3)}
    if name in ("SkipDivergence", "SublayerDivergence"):
        return {field: loose(5) for field in ("variance", "kl", "reverse_kl", "variance_r")} | {
            "flipped": some(5, most=1)
        }
    if name == "GreedyRemoval":
        return {"dense": some(3), "steps": tuple(GreedyStep(layer, some(3), next(floats), 2) for layer in (3, 1))}
    if name == "BestRemoval":
        tried = tuple(Tried("ρ", (0, k), some(3), k == 2, next(floats)) for k in (1, 2))
        final = Final((0, 2), loose(3), some(4), loose(4), next(floats))
        return {"tried": tried, "chosen": 1, "dense": some(3), "finals": (final,)}
    if name == "Healing":
        run = Stretch("best", False, 2e-3, 6), Stretch("here", False, 2e-3, 6, 6)
        stretches = (Stretch("start", True, 1e-3, 4), *run)
        rounds = tuple(Round(stretch, loose(3)) for stretch in stretches)
        return {"rounds": rounds, "losses": loose(16), "judged": some(3)}
    if name == "MendReport":
        gap = Gap(1, 3, "mlp", ("none", "full"), np.array([0.0, 0.1]), loose(2), 1)
        return {"gaps": (gap,)}
    if name == "Router":
        return {"experts": 2, "chosen": 1, "groups": 1, "picked": 1}
    if name == "ExpertUse":
        return {field: some(5, 2) for field in ("tokens", "weight", "saliency")}
    if name == "ExpertRanking":
        return {"scores": loose(5, 2)}
    if name == "LayerRanking":
        largest = np.finfo(np.float64).max  # a layer may have no score, none an infinite one
        return {"scores": some(5, finite=False, most=largest), "picked": some(5, 5, most=1)}
    if name == "PruningPlan":
        gone = ExpertsGone((1,), {4: (0, 2)}, some(5, finite=False, most=1))
        return {"scores": loose(5), "picked": some(5, most=1), "tied": (1, 3), "gone": gone}
    if name == "Allocation":
        amount = some(2, most=1)
        kept = {"names": ("a", "b"), "sizes": (5, 5), "amount": amount, "budget": float(amount.mean())}
        return {"unit": "sparsity", **kept}
    if name == "JointMap":
        fitted = {"scores": some(4), "degree": 1, "coefficients": some(3)}
        return {"removed": some(4, 2, most=1), "errors": {1: next(floats), 2: 0.5}, "excluded": {3: "ρ"}, **fitted}
    if name == "Importance":
        return {"attention": some(5), "activation": some(5)}
    if name == "Compression":
        return {"method": "wanda", "sparsity": 0.5, "bits": None}
    if name == "Points":
        scored = {"pairs": np.array([[0, 3], [2, 1]]), "seeds": np.array([0, 1]), "scores": some(2)}
        return {**scored, "items": loose(2, 3), "losses": some(2, 2), "seconds": some(2)}
    if name == "JointDecision":
        spreads = {field: (next(floats), 5) for field in ("over_seeds", "residual")}
        pairs = np.array([[0, 3], [1, 2], [2, 1]])
        return {"pairs": pairs, **{field: some(3) for field in ("predicted", "low", "high")}, **spreads}
    return {}
