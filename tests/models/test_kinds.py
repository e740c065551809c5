"""The kinds of a decoder's layers, found by rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import TINY, VOCABULARY, make_tiny
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.models.kinds import LayerKinds, find_kinds
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.plan import PruningPlan

# The kinds of six layers of the families that mix some; every other family has one.
MIXED = {
    "gemma2": ((0, 1, 0, 1, 0, 1), 2),
    "gemma3": ((0, 0, 1, 0, 0, 1), 3),
    "qwen2": ((0, 0, 0, 1, 1, 1), None),
    "qwen3": ((0, 0, 1, 1, 1, 1), None),
}


@pytest.mark.parametrize("family", TINY)
def test_kinds_and_period_of_a_family(family: str) -> None:
    kinds = find_kinds(find_structure(make_tiny(family)))
    assert (kinds.kinds, kinds.period) == MIXED.get(family, ((0,) * 6, 1))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_the_period_is_the_smallest_that_fits_twice(kinds: list[int]) -> None:
    fits = [p for p in range(1, len(kinds) // 2 + 1) if all(kinds[i] == kinds[i % p] for i in range(len(kinds)))]
    assert LayerKinds(tuple(kinds)).period == min(fits, default=None)


@given(st.lists(st.integers(0, 1), min_size=2, max_size=3), st.integers(2, 4), st.data())
def test_whole_periods_leave_the_pattern_as_it_was(cycle: list[int], times: int, data: st.DataObject) -> None:
    kinds = LayerKinds(tuple(cycle * times))
    gone = data.draw(st.sets(st.integers(0, times - 1), max_size=times - 1))
    assert kinds.survives(tuple(i for i in range(len(kinds.kinds)) if i // len(cycle) not in gone))


def test_layer_types_count_where_the_modules_do_not_repeat() -> None:
    """A dense layer at the start hides the pattern of attention that engines look for."""
    model = make_tiny("gemma2")
    layers = find_structure(model).layers
    layers[0].mlp, layers[0].self_attn.switch = layers[1].self_attn, True
    assert find_kinds(find_structure(model)) == LayerKinds((0, 1, 0, 1, 0, 1))


def test_the_card_warns_of_engines_when_the_pattern_is_broken(
    tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = tiny("gemma2", vocab_size=len(VOCABULARY))
    write_pruned(model, tokenizer, PruningPlan.given(model, [3]), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "are of 2 kinds, which repeat every 2 layers; those of this model\ndo not any more" in card
    assert "may refuse this model or,\nworse, run layers as the wrong kind" in card
