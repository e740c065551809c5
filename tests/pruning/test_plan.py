"""Plans: what they accept, what they say, whose they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, as_batch, make_mixture, make_tiny
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lyapunov_prune import (
    CheckFailed,
    LyapunovPruneError,
    PruningPlan,
    measure_contraction,
    rank,
    rank_layers,
    remove_layers,
    verify_removal,
)
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.units import selected
from lyapunov_prune.pruning import edit
from lyapunov_prune.pruning.plan import as_plan
from lyapunov_prune.pruning.removed import ChannelsGone, ExpertsGone, LayersGone, PartsGone
from lyapunov_prune.pruning.width import choose_channels


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ([LAYERS], "no layer 6;"),
        ([-1], "no layer -1;"),
        ([2, 2], "name each once"),
        ([], "removes no layer"),
        (list(range(LAYERS)), "keep at least one"),
        ([1.0], r"\[1.0\]"),
        ([True], r"\[True\]"),
    ],
)
def test_bad_indices_are_refused(llama: PreTrainedModel, remove: list[Any], message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        PruningPlan.given(llama, remove)
    with pytest.raises(LyapunovPruneError, match=message):
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
        with pytest.raises(LyapunovPruneError, match="plan is of"):
            as_plan(wrap(other), plan)
    assert as_plan(wrap(make_tiny("llama").bfloat16()), plan) is plan


def test_a_plan_of_an_earlier_version_is_refused_in_one_line(llama: PreTrainedModel, tmp_path: Path) -> None:
    """It knew the model by two numbers of each layer."""
    path = PruningPlan.given(llama, [1]).save(tmp_path / "plan.json")
    content = json.loads(path.read_text())
    del content["model"]["weights"]
    content["model"]["samples"] = [0.5, -0.5]
    path.write_text(json.dumps(content))
    with pytest.raises(LyapunovPruneError, match="PruningPlan"):
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
    with pytest.raises(LyapunovPruneError, match="have one score"):
        replace(PruningPlan.given(llama, [0]), tied=tied)


def test_every_layer_goes_once(llama: PreTrainedModel, tmp_path: Path) -> None:
    plan = PruningPlan.given(llama, PartsGone((4, 1), (2, 0), (3, 0), "affine"))
    assert (plan.remove, plan.kept, plan.touched) == ((1, 4), (0, 2, 3, 5), (0, 1, 2, 3, 4))
    assert (
        PruningPlan.load(plan.save(tmp_path / "plan.json")).gone
        == plan.gone
        == PartsGone((1, 4), (0, 2), (0, 3), "affine")
    )
    frame = plan.to_frame()
    columns = {"removed": [1, 4], "no_attention": [0, 2], "no_activation": [0, 3]}
    assert {name: np.flatnonzero(frame[name]).tolist() for name in columns} == columns
    for refused in (plan.require_gaps, plan.require_plain):
        with pytest.raises(LyapunovPruneError):
            refused()
    whole = PruningPlan.given(llama, [1])
    whole.require_gaps()
    whole.require_plain()
    assert (plan.drops_parts, whole.drops_parts) == (True, False)
    assert PruningPlan.load(whole.save(tmp_path / "whole.json")).gone == LayersGone((1,))


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        (PartsGone((1,), (1,)), "layer 1 goes whole"),
        (PartsGone((1,), (), (1,), "affine"), "layer 1 goes whole"),
        (PartsGone((), (LAYERS,)), "no layer 6;"),
        (PartsGone((), (2, 2)), "name each once"),
        (PartsGone((), (), (1, 1), "affine"), "name each once"),
        (PartsGone((), (True,)), "True"),
        (PartsGone((), (), (1,)), "reduction"),
        (PartsGone((), (), (1,), "mean"), "mean"),
        (PartsGone((), (1,), (), "affine"), "affine"),
        (PartsGone((), ()), "removes no layer"),
    ],
)
def test_parts_that_cannot_go_are_refused(gone: PartsGone, message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        PruningPlan.given(_MODEL, gone)


def test_a_plan_shows_scores_and_ranks(llama: PreTrainedModel) -> None:
    scores = np.array([0.5, 0.1, np.nan, 0.1, 0.9, 0.2])
    picked = np.array([0.0, 1.0, 0.0, 0.1, 0.0999, 0.4])
    plan = replace(PruningPlan.given(llama, [1]), criterion="bi", scores=scores, picked=picked, below_floor=(3,))
    frame = plan.to_frame()
    assert frame["rank"].fillna(0).tolist() == [4, 1, 0, 2, 5, 3]  # none without a score
    assert frame["picked"].tolist() == picked.tolist()
    assert np.flatnonzero(frame["below_floor"]).tolist() == [3]
    # Of a tenth of the draws on a layer that stays is named, the likeliest first.
    assert plan.stability().endswith("1 (100%); left, and picked as well: 5 (40%), 3 (10%)")
    alone = replace(plan, picked=np.eye(6)[1])
    assert alone.stability() == "How often each is picked when the windows are resampled: 1 (100%)"
    assert "Layer 0 is at an end" in replace(plan, gone=LayersGone((0,))).stability()
    assert "Layer 5 is at an end" in replace(plan, gone=LayersGone((5,))).stability()
    assert "at an end" not in replace(plan, gone=LayersGone((4,))).stability()
    assert "at an end" not in replace(plan, gone=LayersGone((0,)), criterion="rho").stability()


def test_a_sentence_says_what_goes(llama: PreTrainedModel) -> None:
    plan = PruningPlan.given(llama, PartsGone((1,), (2,)))
    assert "1 of 6 layers of" in plan.sentence()
    assert "the attention of 1 of 6 layers" in plan.sentence()
    assert "(alpha 0.25)" in replace(plan, criterion="blend", alpha=0.25).sentence()
    seen = plan.seen_on(as_batch(llama, torch.ones(1, 4, dtype=torch.int64)).measured_on(llama))
    assert len(seen.measured_on) == 1
    assert seen.seen_on(seen.measured_on[0]) is seen


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        (ExpertsGone((), {0: (0,), 1: (1, 2)}), "1 are removed from one layer and 2 from another"),
        (ExpertsGone((), {0: (1, 0)}), r"\[1, 0\] of layer 0"),
        (ExpertsGone((), {1: (2, 2)}), r"\[2, 2\] of layer 1"),
        (ExpertsGone((), {0: (-1,)}), r"\[-1\] of layer 0"),
        (ExpertsGone((0,), {0: (0,)}), "layer 0 is removed with its experts"),
        (ExpertsGone((), {}), "experts"),
        (ExpertsGone((), {1: ()}), "experts"),
        (ExpertsGone((), {6: (1,)}), "no layer 6;"),
        (ExpertsGone((), {0: (0,)}, np.zeros(5)), "routed: 5 numbers"),
        (ExpertsGone((), {0: (0,)}, np.full(6, 2.0)), "routed: 2"),
    ],
)
def test_experts_that_fit_no_plan_are_refused(gone: ExpertsGone, message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        PruningPlan.given(_MODEL, gone)


def test_a_plan_says_how_much_of_the_routed_weight_goes(tmp_path: Path) -> None:
    plan = PruningPlan.given(_MODEL, ExpertsGone((), {0: (1, 3), 1: (0, 2)}, np.array([0.1, 0.3, *[np.nan] * 4])))
    assert plan.touched == (0, 1)
    assert "2 experts of each of 2 layers" in plan.sentence()
    assert "20.0% of the router's weight" in plan.sentence()
    again = PruningPlan.load(plan.save(tmp_path / "plan.json"))
    assert (again.gone, str(again), again.to_json()) == (plan.gone, str(plan), plan.to_json())


def test_layers_and_channels_of_the_others_are_one_plan(
    llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path
) -> None:
    further = choose_channels(llama, ids, 8)
    both = replace(further, gone=further.gone.beside((1, 4)))  # type: ignore[union-attr]
    gone = both.gone
    assert isinstance(gone, ChannelsGone)
    assert (both.remove, gone.channels[1], gone.channels[4]) == ((1, 4), (), ())
    assert PruningPlan.load(both.save(tmp_path / "plan.json")).gone == gone
    assert str(gone.kept_channels) == str(tuple(further.gone.kept_channels[layer] for layer in both.kept))
    assert verify_removal(llama, remove_layers(llama, both), both, ids).passed
    other = replace(both, gone=replace(gone, channels=(gone.channels[2], *gone.channels[1:])))
    assert not verify_removal(llama, remove_layers(llama, other), both, ids).passed
    with pytest.raises(LyapunovPruneError, match="every unit"):
        replace(both, gone=replace(gone, channels=(gone.channels[0],) * 6))


def test_layers_and_experts_of_the_others_are_one_plan(ids: torch.Tensor) -> None:
    model = make_mixture("qwen3_moe")
    further = rank(model, ids, what="experts").plan(2)
    both = replace(further, gone=further.gone.beside((0,)))  # type: ignore[union-attr]
    assert isinstance(both.gone, ExpertsGone)
    assert both.gone.experts.keys() == further.gone.experts_gone.keys() - {0}
    np.testing.assert_array_equal(both.gone.routed, [np.nan, *further.gone.routed[1:]])  # type: ignore[union-attr, index, arg-type]
    assert verify_removal(model, remove_layers(model, both), both, ids).passed


def test_the_remedy_is_of_what_goes(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    """Of channels it was `remove other layers`."""
    plans = {
        "remove other layers": PruningPlan.given(llama, [1]),
        "keep those parts": PruningPlan.given(llama, PartsGone((), (1,))),
        "keep all experts": PruningPlan.given(
            make_mixture("qwen3_moe"), ExpertsGone((), dict.fromkeys(range(3), (0,)))
        ),
        "keep the width": choose_channels(llama, ids, 8),
    }
    for said, plan in plans.items():
        assert plan.gone.remedy.startswith(said)
    plan = plans["keep the width"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edit, "selected", lambda old, parts: selected(old.roll(1), parts))
        with pytest.raises(CheckFailed, match=plan.gone.remedy):
            write_pruned(
                llama,
                None,
                replace(plan, gone=replace(plan.gone, channels=((tuple(range(8)),),) * 6)),
                tmp_path / "out",
            )
    assert not (tmp_path / "out").exists()
