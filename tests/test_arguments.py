"""Arguments of public functions that are not what the annotations say: one line with the remedy, before any work."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from helpers import make_tiny
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune.arguments import checked, fits
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError

_IDS = torch.arange(24).view(2, 12)
# Names of arguments for what only the fixtures hold.
_GIVEN = ("model", "teacher", "tokenizer")

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("compress", {"method": "magnitude", "sparsity": 0.5, "pattern": "2-4"}, "write it as 2:4"),
    ("compress", {"method": "magnitude", "sparsity": 0.5, "pattern": (2,)}, "pattern is (2,)"),
    ("compress", {"method": "magnitude", "sparsity": 0.5, "pattern": "2:0"}, "2:0 does not keep a part"),
    ("compress", {"method": "magnitude", "sparsity": "0.5"}, "sparsity is '0.5'"),
    ("compress", {"method": ["magnitude"], "sparsity": 0.5}, "method is ['magnitude']"),
    ("compress", {"batch": [[1, 2]], "method": "wanda", "sparsity": 0.5}, "batch is [[1, 2]]"),
    ("measure_contraction", {"batch": None}, "batch is None"),
    ("measure_contraction", {"batch": _IDS, "seeds": 3}, "seeds is 3"),
    ("measure_contraction", {"batch": _IDS, "seeds": "01"}, "seeds is '01'"),
    ("measure_contraction", {"batch": _IDS, "seeds": (0, 1.5)}, "seeds is (0, 1.5)"),
    ("measure_contraction", {"batch": _IDS, "epsilon": "0.1"}, "epsilon is '0.1'"),
    ("measure_contraction", {"batch": _IDS, "epsilon": None}, "epsilon is None"),
    ("measure_contraction", {"batch": _IDS, "batch_size": 2.5}, "batch_size is 2.5"),
    ("block_influence", {"batch": _IDS, "batch_size": 0}, "batch_size is 0"),
    ("perplexity", {"batch": _IDS, "batch_size": -1}, "batch_size is -1"),
    ("allocate", {"schedule": "uniform", "budget": "0.5"}, "budget is '0.5'"),
    ("allocate", {"schedule": "atp", "budget": 0.5, "beta": "steep"}, "beta of atp is 'steep'"),
    ("check_bounds", {"batch": _IDS, "rank": 2.5}, "rank is 2.5"),
    ("check_bounds", {"batch": _IDS, "cache_radius": "0.1"}, "cache_radius is '0.1'"),
    ("load_text", {"source": None, "tokenizer": "tokenizer"}, "source is None"),
    ("load_text", {"source": "builtin", "tokenizer": None}, "tokenizer is None"),
    ("load_text", {"source": "builtin", "tokenizer": "tokenizer", "tokens": "many"}, "tokens is 'many'"),
    ("load", {"name": "tiny", "dtype": 32}, "dtype is 32"),
    ("heal", {"teacher": "teacher", "batch": _IDS, "steps": True}, "steps is True"),
    ("heal", {"teacher": "teacher", "batch": _IDS, "rank": "8"}, "rank is '8'"),
    ("heal", {"teacher": None, "batch": _IDS}, "teacher is None"),
    ("compare_generation", {"compressed": "teacher", "prompts": _IDS, "steps": 1, "batch_size": 0}, "batch_size is 0"),
    ("compare_generation", {"compressed": "teacher", "prompts": _IDS, "steps": "8"}, "steps is '8'"),
    ("probe_layers", {"prompts": _IDS, "what": ()}, "what is (); give several"),
    ("probe_layers", {"prompts": _IDS, "what": 3}, "what is 3"),
    ("probe_layers", {"prompts": _IDS, "what": "layer"}, "what is 'layer'"),
    ("probe_layers", {"prompts": _IDS, "temperature": "1"}, "temperature is '1'"),
    ("verify_removal", {"pruned": None, "plan": [1]}, "pruned is None"),
    ("verify_removal", {"pruned": "teacher", "plan": 1}, "plan is 1"),
    ("remove_layers", {"plan": 1}, "plan is 1"),
    ("remove_layers", {"plan": "1,2"}, "plan is '1,2'"),
    ("PruningPlan.given", {"gone": 1}, "gone is 1"),
    ("export.write_pruned", {"tokenizer": "tokenizer", "plan": [1], "target": "out"}, "plan is [1]"),
    ("export.write_pruned", {"tokenizer": 3, "plan": None, "target": "out"}, "tokenizer is 3"),
    ("export.make_compact", {"cuts": [1]}, "cuts is [1]"),
    ("verify_removal", {"pruned": "teacher", "plan": [1], "mends": 3}, "mends is 3"),
    ("rank", {"batch": _IDS, "criterion": "bi", "remove": "2"}, "remove is '2'"),
    ("rank", {"batch": _IDS, "criterion": ["bi"]}, "criterion is ['bi']"),
    ("rank", {"batch": _IDS, "criterion": "random", "seed": -1}, "seed is -1"),
    ("rank", {"batch": _IDS, "criterion": "best", "remove": 1, "search": math.nan}, "search is nan"),
    ("measure_contraction", {"batch": _IDS, "epsilon": math.inf}, "epsilon is inf"),
    ("measure_contraction", {"batch": _IDS, "seeds": [0, 2**45]}, "give several int from 0 to 4294967295"),
    ("measure_contraction", {"batch": _IDS, "seeds": range(2**32 - 1, 2**32 + 1)}, "give several int from 0 to"),
    ("heal", {"teacher": "teacher", "batch": _IDS, "seed": 2**64}, "seed is 18446744073709551616"),
    ("compress", {"method": "magnitude", "sparsity": math.nan}, "sparsity is nan"),
    ("bounds.check_grid", {"batch": _IDS, "sparsities": (0.5, math.nan)}, "sparsities is (0.5, nan)"),
    ("allocate", {"schedule": "atp", "budget": 0.5, "beta": math.nan}, "beta is nan"),
    ("measure_sensitivity", {"batch": _IDS, "studies": 3}, "studies is 3"),
    ("measure_sensitivity", {"batch": _IDS, "limit": "10"}, "limit is '10'"),
    ("measure_sensitivity", {"batch": _IDS, "limit": -1.0}, "limit is -1.0"),
    ("measure_sensitivity", {"batch": _IDS, "folder": 3}, "folder is 3"),
    ("bounds.check_grid", {"batch": _IDS, "sparsities": 0.5}, "sparsities is 0.5"),
    ("ranking.greedy_removal", {"batch": _IDS, "remove": None}, "remove is None"),
]  # fmt: skip


def public(name: str) -> Any:
    *rooms, last = name.split(".")
    home: Any = lp
    for room in rooms:
        home = getattr(home, room)
    return getattr(home, last)


def line_of(call: Callable[[], object]) -> str:
    with pytest.raises(LyapunovPruneError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("name", "arguments", "remedy"), BAD)
def test_a_bad_argument_gets_one_line_with_the_remedy(
    name: str,
    arguments: dict[str, Any],
    remedy: str,
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    function = public(name)
    fixtures = {"model": reader, "teacher": reader, "tokenizer": tokenizer}
    given = {key: fixtures[v] if isinstance(v, str) and v in _GIVEN else v for key, v in arguments.items()}
    first = next(iter(inspect.signature(function).parameters))
    if first in ("model", "student", "dense", "original"):
        given = {first: reader, **given}
    assert remedy in line_of(partial(function, **given))


HOMES = [lp, *(room for name in lp.__all__ if isinstance(room := getattr(lp, name), ModuleType))]
FUNCTIONS = {
    f"{home.__name__}.{name}": thing
    for home in HOMES
    for name in home.__all__
    if not isinstance(thing := getattr(home, name), ModuleType | type)
}
# On tensors, called for every batch.
UNCHECKED = {"lyapunov_prune.linalg.lift", "lyapunov_prune.linalg.token_energy", "lyapunov_prune.linalg.widen"}


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - UNCHECKED))
def test_every_public_function_looks_at_what_it_is_given(name: str) -> None:
    """One that is added without being `checked` is found here."""
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters.values()
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    assert line_of(partial(function, **dict.fromkeys(wanted or [next(iter(parameters)).name], object())))


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - UNCHECKED))
def test_a_value_can_be_held_against_every_annotation(name: str) -> None:
    """Python itself refuses to ask whether something is of a protocol, unless that is `runtime_checkable`."""
    for hint in get_type_hints(inspect.unwrap(FUNCTIONS[name])).values():
        assert fits(None, hint) in (True, False)


def test_a_pattern_may_be_written_as_on_the_command_line(reader: PreTrainedModel) -> None:
    pairs, spelled = (
        lp.compress(reader, method="magnitude", pattern=pattern, sparsity=sparsity)
        for pattern, sparsity in (((2, 4), 0.5), ("2:4", None))
    )
    assert spelled.report.pattern == (2, 4)
    assert str(spelled.report) == str(pairs.report)
    for a, b in zip(spelled.model.parameters(), pairs.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_measurements_of_no_model_or_no_steps_are_refused(reader: PreTrainedModel) -> None:
    assert "models is a dict; give" in line_of(lambda: lp.measure_speed({}))
    assert "steps is 0" in line_of(lambda: lp.measure_speed({"a": reader}, steps=0))
    assert "models is [1]" in line_of(lambda: lp.measure_speed([1]))  # type: ignore[arg-type]
    listed: Any = [[1, 2]]
    assert "token ids are a list" in line_of(lambda: lp.perplexity(reader, TokenBatch(listed, "ids", "all", None)))
    with pytest.raises(TypeError, match="'batch'"):
        lp.perplexity(reader)  # type: ignore[call-arg]


@pytest.mark.parametrize("seeds", [range(2), [0, 1], {0, 1}, np.arange(2), iter((0, 1)), (np.int64(0), 1)])
def test_what_is_plainly_meant_is_taken(seeds: Any, llama: PreTrainedModel) -> None:
    epsilon: Any = np.float32(0.01)
    assert lp.measure_contraction(llama, _IDS[:1], seeds=seeds, epsilon=epsilon).seeds == (0, 1)


def test_a_wrapped_model_is_judged_further_in() -> None:
    """Of its own kind of fault the function says more than that it is no PreTrainedModel."""

    wrapped: Any = nn.Module()
    wrapped.peft_config = {}
    assert "adapters are attached" in line_of(lambda: lp.remove_layers(wrapped, [1]))


def test_a_function_is_checked_with_the_names_of_its_own_file() -> None:
    calls: list[Any] = []

    @checked
    def f(a: int, *, b: float | None = None, **more: float) -> None:
        calls.append((a, b, more))

    f(1, b=2, c=0.5)
    assert "f: a is '1'" in line_of(partial(f, "1"))
    assert "f: b is True" in line_of(partial(f, 1, b=True))
    assert "f: c is 'x'" in line_of(partial(f, 1, c="x"))
    assert "f: a is a LlamaForCausalLM" in line_of(partial(f, make_tiny("llama")))
    assert calls == [(1, 2, {"c": 0.5})]
