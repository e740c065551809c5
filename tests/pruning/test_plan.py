"""Plans: what they accept, what they say, whose they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LAYERS, make_tiny
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, PruningPlan, measure_contraction, rank_layers, remove_layers
from lyapunov_prune.pruning.plan import as_plan


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ([LAYERS], "layer 6 does not exist"),
        ([-1], "layer -1 does not exist"),
        ([2, 2], "named more than once"),
        ([], "removes no layer"),
        (list(range(LAYERS)), "keep at least one"),
        ([1.0], "must be integers"),
        ([True], "must be integers"),
    ],
)
def test_bad_indices_are_refused(llama: PreTrainedModel, remove: list[Any], message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        replace(PruningPlan.given(llama, [0]), remove=tuple(remove))
    said = message.replace("must be integers", "give PruningPlan or several int")
    with pytest.raises(LyapunovPruneError, match=said):
        remove_layers(llama, remove)


@given(st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS - 1))
def test_kept_and_removed_make_the_model(remove: set[int]) -> None:
    plan = PruningPlan.given(_MODEL, list(remove))
    assert plan.remove == tuple(sorted(remove))
    assert sorted(plan.kept + plan.remove) == list(range(LAYERS))
    assert plan.to_frame()["removed"].sum() == len(remove)


_MODEL = make_tiny("gpt2")


def test_a_plan_for_another_model_is_refused(llama: PreTrainedModel) -> None:
    plan = PruningPlan.given(llama, [1])
    for other in (make_tiny("qwen3"), make_tiny("llama", seed=1), make_tiny("llama", num_hidden_layers=5)):
        with pytest.raises(LyapunovPruneError, match="made for"):
            as_plan(other, plan)
    assert as_plan(make_tiny("llama").bfloat16(), plan) is plan


def test_a_plan_of_an_earlier_version_is_refused_in_one_line(llama: PreTrainedModel, tmp_path: Path) -> None:
    """It knew the model by two numbers of each layer."""
    path = PruningPlan.given(llama, [1]).save(tmp_path / "plan.json")
    content = json.loads(path.read_text())
    del content["model"]["weights"]
    content["model"]["samples"] = [0.5, -0.5]
    path.write_text(json.dumps(content))
    with pytest.raises(LyapunovPruneError, match=r"does not fit this version's PruningPlan .*; make it again$"):
        PruningPlan.load(path)


def test_saves_and_loads_with_its_reasons(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    plan = rank_layers(measure_contraction(llama, ids, seeds=(0,)), criterion="rho").plan(2)
    again = PruningPlan.load(plan.save(tmp_path / "plan.json"))
    assert again.remove == plan.remove
    assert (again.scores == plan.scores).all()
    assert again.measured_on == plan.measured_on
    assert again.model.same_as(plan.model)
    assert str(again) == str(plan)


@pytest.mark.parametrize("tied", [(0,), (0, 1, 2)])
def test_not_one_layer_is_tied_nor_three(tied: tuple[int, ...], llama: PreTrainedModel) -> None:
    """Edited by hand, such a plan ended in a traceback where it was shown."""
    with pytest.raises(LyapunovPruneError, match="two layers have one score or none, not "):
        replace(PruningPlan.given(llama, [0]), tied=tied)
