"""Configs, results and texts drawn around valid ones: done, or one line with exit code 2 and nothing written.

`LYAPUNOV_PRUNE_EXAMPLES` says how many are drawn of each, 20 if not given; an example that hangs is over its deadline.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Done, example
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import LyapunovPruneError, compress
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.data.text import load_text
from lyapunov_prune.models.structure import identify
from lyapunov_prune.profiles.profile import LayerProfile, profile_layers
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking.measured import rank_layers
from lyapunov_prune.report import page
from lyapunov_prune.results.result import Result

pytestmark = pytest.mark.usefixtures("drawn")
EXAMPLES = int(os.environ.get("LYAPUNOV_PRUNE_EXAMPLES", "20"))
drawn = settings(
    max_examples=EXAMPLES,
    deadline=timedelta(seconds=60),
    suppress_health_check=list(HealthCheck),
    derandomize="LYAPUNOV_PRUNE_EXAMPLES" not in os.environ,
)
few = settings(drawn, max_examples=max(3, EXAMPLES // 6))  # of what loads a model each time
NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 7, 2**31, 2**45, 2**63, 10**30, -0.5, 2.5, 1e300, 1e-320, float("nan"), float("inf")]
)
WORDS = st.sampled_from(["", "x", "nan", "$\\frac$", "\x1b[2J", "<b>", "\ud800", "ρ" * 300, "../x", "a\0b", "llama"])
SCALARS = NUMBERS | WORDS | st.none() | st.booleans()
JUNK = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(WORDS, x, max_size=2), max_leaves=6)


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in a JSON document; of a list to the first two and the last."""
    if before:
        yield before
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*before, key))
    elif isinstance(value, list):
        for index in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from places(value[index], (*before, index))


@st.composite
def damaged(draw: st.DrawFn, document: Any) -> Any:
    """`document` with one or two places replaced, deleted, doubled or put deeper."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        ways = list(places(document))
        if not ways:
            break
        *way, last = draw(st.sampled_from(ways))
        inner = document
        for key in way:
            inner = inner[key]
        how = draw(st.sampled_from(["replace", "replace", "delete", "double", "deeper"]))
        if how == "delete":
            del inner[last]
        elif how == "double" and isinstance(inner[last], list | str):
            inner[last] = inner[last] * 2
        elif how == "deeper":
            inner[last] = [inner[last]]
        else:
            inner[last] = draw(JUNK)
    return document


@pytest.fixture(scope="module")
def valid(reader: PreTrainedModel) -> dict[type[Result], Result]:
    ids = torch.arange(3, 67).view(2, 32)
    profile = profile_layers(reader, ids, seeds=[0])
    plan = rank_layers(profile.contraction, profile.influence).plan(2)
    allocation = compress(reader, ids, method="magnitude", sparsity=0.5).report.allocation
    assert isinstance(allocation, Allocation)
    return {PruningPlan: plan, LayerProfile: profile, Allocation: allocation}


@pytest.mark.parametrize("kind", [PruningPlan, LayerProfile, Allocation], ids=lambda kind: kind.__name__)
def test_a_damaged_result_is_used_or_refused(
    kind: type[Result], valid: dict[type[Result], Result], reader: PreTrainedModel, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"

    @drawn
    @given(damaged(valid[kind].to_json()))
    def check(document: Any) -> None:
        path.write_text(json.dumps(document))
        told = ""
        try:
            result = kind.load(path)
            assert str(result)
            assert len(result.to_frame())
            result.save(tmp_path / "again.json")
            if isinstance(result, LayerProfile):
                rank_layers(result.contraction, result.influence).plan(1)
            elif isinstance(result, PruningPlan | Allocation):
                result.require_model(reader if isinstance(result, Allocation) else identify(reader))
        except LyapunovPruneError as error:
            told = str(error)
        assert told.isprintable()

    check()


def must_end_well(done: Done) -> None:
    assert done.code in (0, 1, 2), done
    if done.code:
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1
        assert done.changed == set()


def test_a_damaged_profile_on_the_command_line(
    valid: dict[type[Result], Result], run: Callable[..., Done], checkpoint: Path
) -> None:
    @drawn
    @given(damaged(valid[LayerProfile].to_json()))
    def check(document: Any) -> None:
        (checkpoint.parent / "profile.json").write_text(json.dumps(document))
        must_end_well(run("rank", "profile.json", "--remove", "1"))

    check()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_damaged_checkpoint_on_the_command_line(file: str, run: Callable[..., Done], checkpoint: Path) -> None:
    whole = json.loads((checkpoint / file).read_text())

    @few
    @given(damaged(whole))
    def check(document: Any) -> None:
        (checkpoint / file).write_text(json.dumps(document))
        must_end_well(run("eval", "tiny", "--tokens", "64", "--context", "32", "-o", "run"))

    check()


def test_lines_of_any_kind(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = JUNK | st.fixed_dictionaries({"text": JUNK | st.text(min_size=40)})

    @drawn
    @given(st.lists(lines, max_size=6))
    def check(documents: list[Any]) -> None:
        path.write_text("\n".join(map(json.dumps, documents)))
        told = ""
        try:
            load_text(path, tokenizer, tokens=8, context=4, split="all")
        except LyapunovPruneError as error:
            told = str(error)
        assert told.isprintable()

    check()


SECTIONS = {(section.file, section.kind): None for section in page.SECTIONS}


@pytest.mark.parametrize(("file", "kind"), SECTIONS, ids=[file for file, _ in SECTIONS])
def test_damaged_results_are_drawn_or_refused(file: str, kind: type[Result], tmp_path: Path) -> None:
    whole = example(kind, itertools.cycle([0.1, 0.7, 0.3])).to_json()

    @few
    @given(damaged(whole))
    def check(document: Any) -> None:
        (tmp_path / file).write_text(json.dumps(document))
        told = ""
        try:
            page.write_report(tmp_path)
        except LyapunovPruneError as error:
            told = str(error)
        assert told.isprintable()

    check()
