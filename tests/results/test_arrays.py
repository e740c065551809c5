"""Results with numbers that no model has: refused when they are made, read, or used on a model that they do not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, as_batch, make_tiny

from lyapunov_prune import LyapunovPruneError, PruningPlan, allocate, block_influence, compress, rank_layers
from lyapunov_prune.allocation import Allocation
from lyapunov_prune.allocation.allocation import Matrices
from lyapunov_prune.predictions import skip_divergence
from lyapunov_prune.profiles import sublayer_influence
from lyapunov_prune.profiles.profile import profile_layers
from lyapunov_prune.ranking import rank_by_divergence, rank_sublayers
from lyapunov_prune.results.result import Result

_MODEL = make_tiny("llama")
_IDS = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
_PROFILE = profile_layers(_MODEL, as_batch(_MODEL, _IDS), seeds=(0, 1))
RESULTS: dict[str, Result] = {
    "profile": _PROFILE,
    "contraction": _PROFILE.contraction,
    "influence": _PROFILE.influence,
    "sublayers": sublayer_influence(_MODEL, _IDS),
    "divergence": (_DIVERGENCE := skip_divergence(_MODEL, _IDS)),
    "ranking": (_RANKING := rank_layers(_PROFILE.contraction, _PROFILE.influence)),
    "plan": _RANKING.plan(2),
    "allocation": allocate(_MODEL, "atp", 0.5),
    "bits": Matrices.of(_MODEL).allocated(
        "by hand", 4.0, np.full(len(Matrices.of(_MODEL).sizes), 4.0), {}, unit="bits"
    ),
}
# A result, the way to a list in its file, and whether a number there may be missing (NaN), as documented.
LISTS: list[tuple[str, tuple[str, ...], bool]] = [
    ("profile", ("contraction", "floor"), False),
    ("profile", ("influence", "influence"), False),
    *(("contraction", ("energies", pooling), False) for pooling in ("energy", "token")),
    *(("contraction", (name,), True) for name in ("error_growth", "state_growth", "sink_state_share")),
    ("contraction", ("sink_error_share",), True),
    ("contraction", ("intervals", "token"), True),
    ("contraction", ("floor",), False),
    ("influence", ("influence",), False),
    ("influence", ("spread",), True),
    ("influence", ("change",), False),
    *(("sublayers", (name,), True) for name in ("attention", "mlp", "attention_spread", "mlp_spread")),
    *(("divergence", (name,), True) for name in ("variance", "kl", "reverse_kl", "flipped")),
    ("ranking", ("scores",), False),
    ("plan", ("scores",), True),
    ("allocation", ("amount",), False),
    ("allocation", ("sizes",), False),
    ("bits", ("amount",), False),
]


def changed(name: str, way: tuple[str, ...], change: Callable[[list[Any]], list[Any]], path: Path) -> Path:
    """The file of a result with one of its lists changed."""
    data = RESULTS[name].to_json()
    at = data
    for step in way[:-1]:
        at = at[step]
    at[way[-1]] = change(at[way[-1]])
    path.write_text(json.dumps(data))
    return path


def put(values: list[Any], value: Any) -> list[Any]:
    """`value` in the place of the third number, or of the first of the third row."""
    return [*values[:2], [value, *values[2][1:]] if isinstance(values[2], list) else value, *values[3:]]


@pytest.mark.parametrize(("name", "way", "may_lack"), LISTS)
def test_a_file_of_wrong_sizes_or_numbers_is_refused(
    name: str, way: tuple[str, ...], may_lack: bool, tmp_path: Path
) -> None:
    kind, path = type(RESULTS[name]), tmp_path / "x.json"
    assert str(kind.load(RESULTS[name].save(tmp_path / "right.json"))) == str(RESULTS[name])
    bad: dict[str, Callable[[list[Any]], list[Any]]] = {"short": lambda v: v[:-1], "long": lambda v: [*v, v[-1]]}
    if way != ("scores",):
        bad["negative"] = lambda v: put(v, -0.5)
    if not may_lack:
        bad |= {"nan": lambda v: put(v, "NaN"), "inf": lambda v: put(v, "Infinity")}
    for change in bad.values():
        with pytest.raises(LyapunovPruneError, match=f"{way[-1]}.*again") as error:
            kind.load(changed(name, way, change, path))
        assert "\n" not in str(error.value)
    if may_lack:
        kind.load(changed(name, way, lambda v: put(v, "NaN"), path))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("allocation", {"amount": np.full(42, 1.5)}, "1.5 at place 0 "),
        ("bits", {"amount": np.full(42, 17.0)}, "17 at place 0 "),
        ("allocation", {"names": ("a",) * 42}, "every matrix once"),
        ("allocation", {"layers": (LAYERS,) * 42}, "6 at place 0 "),
        ("allocation", {"layers": (0,)}, "1 numbers .*42"),
        ("contraction", {"energies": {"energy": np.ones(7)}}, "both poolings"),
        ("contraction", {"sink_state_share": np.full(7, 1.5)}, "1.5 at place 0 "),
        ("ranking", {"below_floor": (6,)}, "below_floor: 6 at place 0 "),
        ("plan", {"below_floor": (-1,)}, "below_floor.*layer -1"),
        ("profile", {"influence": block_influence(make_tiny("llama", seed=1), _IDS)}, "of two models"),
    ],
)
def test_what_cannot_be_is_not_made(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        replace(RESULTS[name], **fields)  # type: ignore[type-var]


@pytest.mark.parametrize(("name", "field"), [("allocation", "unit"), ("contraction", "pooling")])
def test_a_file_with_an_unknown_choice_is_refused(name: str, field: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(RESULTS[name].to_json() | {field: "mean"}))
    with pytest.raises(LyapunovPruneError, match="mean"):
        type(RESULTS[name]).load(tmp_path / "x.json")


def test_what_is_documented_to_lack_numbers_may() -> None:
    assert PruningPlan.given(_MODEL, [1]).scores.size == 0
    lacking = replace(sublayer_influence(_MODEL, _IDS), mlp=np.array([0.1, math.nan, *np.full(4, 0.2)]))
    assert 1 not in rank_sublayers(lacking, "mlp").order
    with pytest.raises(LyapunovPruneError, match="number 3"):
        rank_by_divergence(replace(_DIVERGENCE, variance=np.array([0.1, 0.1, 0.1, math.nan, 0.1, 0.1])))


@pytest.mark.parametrize("field", ["names", "sizes", "layers"])
def test_an_allocation_of_other_matrices_is_refused(field: str) -> None:
    allocation: Any = RESULTS["allocation"]
    others = {
        "names": ("model.layers.0.self_attn.w_proj", *allocation.names[1:]),
        "sizes": (7, *allocation.sizes[1:]),
        "layers": (1, *allocation.layers[1:]),
    }
    with pytest.raises(LyapunovPruneError, match="allocate"):
        compress(_MODEL, method="magnitude", allocation=replace(allocation, **{field: others[field]}))
    assert isinstance(compress(_MODEL, method="magnitude", allocation=allocation).report.allocation, Allocation)
