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
from lyapunov_prune.pruning.width import choose_channels


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ([LAYERS], "layer 6 of"),
        ([-1], "layer -1 of"),
        ([2, 2], "name each once"),
        ([], "removes no layer"),
        (list(range(LAYERS)), "keep at least one"),
        ([1.0], r"\[1.0\]"),
        ([True], r"\[True\]"),
    ],
)
def test_bad_indices_are_refused(llama: PreTrainedModel, remove: list[Any], message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        replace(PruningPlan.given(llama, [0]), remove=tuple(remove))
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


def test_every_layer_goes_once(llama: PreTrainedModel) -> None:
    plan = PruningPlan.given(llama, [4, 1], drop_attention=[2], drop_mlp=[3], drop_activation=[0], reduction="affine")
    assert (plan.remove, plan.kept, plan.touched) == ((1, 4), (0, 2, 3, 5), (0, 1, 2, 3, 4))
    assert plan.drops_parts
    frame = plan.to_frame()
    columns = {"removed": [1, 4], "no_attention": [2], "no_mlp": [3], "no_activation": [0]}
    assert {name: np.flatnonzero(frame[name]).tolist() for name in columns} == columns
    for part in ("drop_attention", "drop_mlp", "drop_activation"):
        named = {part: [1], "reduction": "affine" if part == "drop_activation" else None}
        with pytest.raises(LyapunovPruneError, match="layer 1 goes whole"):
            PruningPlan.given(llama, [1], **named)
        assert PruningPlan.given(llama, [], **named).drops_parts
        with pytest.raises(LyapunovPruneError, match="mending"):
            PruningPlan.given(llama, [], **named).require_gaps()
    with pytest.raises(LyapunovPruneError, match="layer 2 goes whole"):
        PruningPlan.given(llama, drop_mlp=[2], drop_activation=[2], reduction="affine")
    PruningPlan.given(llama, drop_attention=[2], drop_activation=[2], reduction="affine")
    whole = PruningPlan.given(llama, [1])
    whole.require_gaps()
    assert not whole.drops_parts
    assert "no_attention" not in whole.to_frame()


def test_activations_and_reductions_go_together(llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match="reduction affine"):
        PruningPlan.given(llama, [1], reduction="affine")
    with pytest.raises(LyapunovPruneError, match="without a reduction"):
        PruningPlan.given(llama, drop_activation=[1])
    with pytest.raises(LyapunovPruneError, match="reduction 'cubic'"):
        PruningPlan.given(llama, drop_activation=[1], reduction="cubic")


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
    assert "Layer 0 is at an end" in replace(plan, remove=(0,)).stability()
    assert "Layer 5 is at an end" in replace(plan, remove=(5,)).stability()
    assert "at an end" not in replace(plan, remove=(4,)).stability()
    assert "at an end" not in replace(plan, remove=(0,), criterion="rho").stability()


def test_a_sentence_says_what_goes(llama: PreTrainedModel) -> None:
    plan = PruningPlan.given(llama, [1], drop_attention=[2])
    assert "1 of 6 layers of" in plan.sentence()
    assert "the attention of 1 of 6 layers" in plan.sentence()
    assert "(alpha 0.25)" in replace(plan, criterion="blend", alpha=0.25).sentence()
    seen = plan.seen_on(as_batch(llama, torch.ones(1, 4, dtype=torch.int64)).measured_on(llama))
    assert len(seen.measured_on) == 1
    assert seen.seen_on(seen.measured_on[0]) is seen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": ((0,), (1,))}, "2 entries and .* 6 layers"),
        ({"experts": ((0,), (1, 2), (), (), (), ())}, "1 are removed from one layer and 2 from another"),
        ({"experts": ((1, 0), (), (), (), (), ())}, r"\[1, 0\] of layer 0"),
        ({"experts": ((), (2, 2), (), (), (), ())}, r"\[2, 2\] of layer 1"),
        ({"experts": ((-1,), (), (), (), (), ())}, r"\[-1\] of layer 0"),
        ({"experts": ((0,), (), (), (), (), ()), "remove": (0,)}, "layer 0 is removed with its experts"),
        ({"experts": ((),) * 6}, "removes no layer"),
        ({"experts": ((0,), (), (), (), (), ()), "routed": np.zeros(5)}, "routed: 5 numbers"),
        ({"experts": ((0,), (), (), (), (), ()), "routed": np.full(6, 2.0)}, "routed: 2"),
    ],
)
def test_experts_that_fit_no_plan_are_refused(changes: dict[str, Any], message: str) -> None:
    plan = PruningPlan.given(_MODEL, experts={0: (3, 1)})
    assert (plan.experts, plan.touched) == (((1, 3), (), (), (), (), ()), (0,))
    with pytest.raises(LyapunovPruneError, match=message):
        replace(plan, **{"remove": (), **changes})
    with pytest.raises(LyapunovPruneError, match="layer 6 of"):
        PruningPlan.given(_MODEL, experts={6: (1,)})


def test_a_plan_says_how_much_of_the_routed_weight_goes(tmp_path: Path) -> None:
    routed = np.array([0.1, 0.3, *[np.nan] * 4])
    plan = replace(PruningPlan.given(_MODEL, experts={0: (1, 3), 1: (0, 2)}), routed=routed)
    assert "2 experts of each of 2 layers" in plan.sentence()
    assert "20.0% of the router's weight" in plan.sentence()
    again = PruningPlan.load(plan.save(tmp_path / "plan.json"))
    assert (again.experts, str(again)) == (plan.experts, str(plan))


def test_layers_and_channels_of_the_others_are_one_plan(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    first = PruningPlan.given(llama, [1, 4])
    further = choose_channels(llama, ids, 8)
    both = first.followed_by(further)
    assert (both.remove, both.channels[1], both.channels[4]) == ((1, 4), (), ())
    assert str(both.kept_channels) == str(tuple(further.kept_channels[layer] for layer in both.kept))
    assert both.measured_on == further.measured_on
    assert verify_removal(llama, remove_layers(llama, both), both, ids).passed
    other = replace(both, channels=(both.channels[2], *both.channels[1:]))
    assert not verify_removal(llama, remove_layers(llama, other), both, ids).passed
    for wrong in (first, choose_channels(remove_layers(llama, first), ids, 8)):
        with pytest.raises(LyapunovPruneError, match="one plan removes whole layers"):
            first.followed_by(wrong)
    with pytest.raises(LyapunovPruneError, match="every unit"):
        replace(both, channels=tuple(both.channels[0] for _ in range(6)))


def test_layers_and_experts_of_the_others_are_one_plan(ids: torch.Tensor) -> None:
    model = make_mixture("qwen3_moe")
    first = PruningPlan.given(model, [0])
    further = rank(model, ids, what="experts").plan(2)
    both = first.followed_by(further)
    assert both.experts == ((), *further.experts[1:])
    assert both.routed is not None
    assert further.routed is not None
    np.testing.assert_array_equal(both.routed, [np.nan, *further.routed[1:]])
    assert verify_removal(model, remove_layers(model, both), both, ids).passed


def test_the_remedy_is_of_what_goes(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    """Of channels it was `remove other layers`."""
    plans = {
        "remove other layers": PruningPlan.given(llama, [1]),
        "keep those parts": PruningPlan.given(llama, drop_mlp=[1]),
        "keep all experts": PruningPlan.given(make_mixture("qwen3_moe"), experts={i: [0] for i in range(3)}),
        "keep the width": choose_channels(llama, ids, 8),
    }
    for said, plan in plans.items():
        assert plan.remedy.startswith(said)
    plan = plans["keep the width"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edit, "selected", lambda old, parts: selected(old.roll(1), parts))
        with pytest.raises(CheckFailed, match=plan.remedy):
            write_pruned(llama, None, replace(plan, channels=((tuple(range(8)),),) * 6), tmp_path / "out")
    assert not (tmp_path / "out").exists()
