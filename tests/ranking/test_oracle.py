"""The greedy search finds what brute force over physical removals finds, and does no job twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, computed, hooks_of, leave, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, block_influence, perplexity, remove_layers
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.ranking import GreedyRemoval, greedy_removal
from lyapunov_prune.sensitivity.sweep import Sweep

SMALLER = 5


def brute_force(model: PreTrainedModel, ids: torch.Tensor, remove: int) -> list[tuple[int, np.ndarray]]:
    """Layers and losses without them: every removal is made, and its perplexity measured."""
    gone: list[int] = []
    found = []
    for _ in range(remove):
        left = [k for k in range(find_structure(model).num_layers) if k not in gone]
        windows = {k: perplexity(remove_layers(model, [*gone, k]), ids).windows for k in left}
        best = min(left, key=lambda k: windows[k].mean())
        gone.append(best)
        found.append((best, windows[best]))
    return found


def assert_agree(found: GreedyRemoval, wanted: Sequence[tuple[int, np.ndarray]]) -> None:
    assert found.order == tuple(layer for layer, _ in wanted)
    for step, (_, windows) in zip(found.steps, wanted, strict=True):
        np.testing.assert_allclose(step.windows, windows, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_each_step_is_the_best_of_all_physical_removals(name: str, ids: torch.Tensor) -> None:
    model = make_tiny(name, num_hidden_layers=SMALLER)
    found = greedy_removal(model, ids, SMALLER - 1, batch_size=2)
    assert_agree(found, brute_force(model, ids, SMALLER - 1))
    np.testing.assert_allclose(found.dense, perplexity(model, ids).windows, rtol=1e-6)
    assert [step.heads for step in found.steps] == [6, 5, 4, 3]
    np.testing.assert_allclose(found.losses, [found.dense.mean(), *(s.windows.mean() for s in found.steps)])
    assert hooks_of(model) == 0
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_layer_that_needs_more_than_its_state_is_given_it(ids: torch.Tensor) -> None:
    """Layer 4 adds what layer 1 left: gone first, layer 1 still computes in the steps that follow."""
    model = make_tiny("llama")
    leave(model, 1, 4, taken=False)
    structure = find_structure(model)
    found = greedy_removal(model, ids, 3, candidates=lambda removed: {0, 2, 3, 5} - {*removed} if removed else [1])
    assert found.order[0] == 1
    for count, step in enumerate(found.steps, 1):
        with skipped(structure, found.order[:count]):
            np.testing.assert_allclose(step.windows, perplexity(model, ids).windows, rtol=1e-5)


def test_a_plan_is_a_piece_of_the_order(ids: torch.Tensor, tmp_path: Path) -> None:
    model = make_tiny("llama")
    found = greedy_removal(model, ids, 3)
    for count in (1, 3):
        plan = found.plan(count)
        assert plan.remove == tuple(sorted(found.order[:count]))
        assert plan.criterion == "oracle"
        np.testing.assert_array_equal(plan.scores[list(found.order)], [0, 1, 2])
        assert np.isnan(plan.scores).sum() == LAYERS - 3
        got = perplexity(remove_layers(model, plan), ids)
        np.testing.assert_allclose(got.windows, found.steps[count - 1].windows, rtol=1e-5)
    for count in (0, 4):
        with pytest.raises(LyapunovPruneError, match=f"3 layers, not {count}|remove is {count}"):
            found.plan(count)
    assert "perplexity" in str(GreedyRemoval.load(found.save(tmp_path / "greedy.json")))


def test_forwards_are_those_that_were_run(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    calls: list[int] = []
    for layer in find_structure(model).layers:
        layer.self_attn.q_proj.register_forward_pre_hook(lambda m, args: calls.append(args[0][..., 0].numel()))
    found = greedy_removal(model, ids, 2, batch_size=2)
    assert found.forwards == pytest.approx(sum(calls) / (LAYERS * ids.numel()))
    # Half a forward a layer, the dense one, the walk, and trials on a few tokens: two prefixes and a scorer.
    trials = [(2 * 4 + 2) * 32 / ids.numel(), (4 + 2) * 32 / ids.numel()]
    assert LAYERS / 2 < found.steps[0].forwards < (LAYERS - 1) / 2 + 2 + trials[0]
    assert (LAYERS - 1) / 2 < found.steps[1].forwards < (LAYERS - 2) / 2 + 2 + trials[1]


# Candidates.


def test_candidates_see_the_pruned_model_and_limit_what_is_tried(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    seen: list[tuple[int, ...]] = []
    measured: list[np.ndarray] = []

    def two_best(removed: tuple[int, ...]) -> list[int]:
        seen.append(removed)
        measured.append(block_influence(model, ids).influence)
        left = [k for k in range(LAYERS) if k not in removed]
        return sorted(left, key=lambda k: measured[-1][k])[:2]

    found = greedy_removal(model, ids, 3, candidates=two_best, criterion="two best")
    assert seen == [found.order[:n] for n in range(3)]
    assert [step.heads for step in found.steps] == [3, 3, 3]
    assert found.plan(1).criterion == "two best"
    for n, influence in enumerate(measured):
        gone = sorted(found.order[:n])
        pruned = remove_layers(model, gone) if gone else model
        np.testing.assert_array_equal(influence[gone], 0)
        np.testing.assert_allclose(np.delete(influence, gone), block_influence(pruned, ids).influence, rtol=1e-4)
        got = perplexity(remove_layers(model, found.order[: n + 1]), ids)
        np.testing.assert_allclose(found.steps[n].windows, got.windows, rtol=1e-5)


@pytest.mark.parametrize("chosen", [[], [0], [LAYERS], [-1]], ids=str)
def test_candidates_that_are_not_there_are_refused(chosen: list[int], ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="name layers that are left"):
        greedy_removal(make_tiny("llama"), ids, 2, candidates=lambda removed: chosen if removed else [0])


@pytest.mark.parametrize("remove", [0, -1, LAYERS])
def test_a_number_that_leaves_no_layer_is_refused(
    remove: int, llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path
) -> None:
    with pytest.raises(LyapunovPruneError, match=f"remove {remove} of 6"):
        greedy_removal(llama, ids, remove, folder=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_layer_without_which_the_loss_is_none_is_not_chosen(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny("llama")
    best = greedy_removal(model, ids, 1).order[0]
    run = Sweep.run

    def spoiled(self: Sweep, *args: Any) -> Any:
        found = run(self, *args)
        for layer in {0, best}:  # the first one tried, and the one that it would be
            found[f"remove {layer}"].windows[:] = np.nan
        return found

    monkeypatch.setattr(Sweep, "run", spoiled)
    assert greedy_removal(model, ids, 1).order[0] not in {0, best}
    with pytest.raises(LyapunovPruneError, match="no layer beside none"):
        greedy_removal(model, ids, 1, candidates=lambda removed: {0, best})


# Interrupted.


def interrupted(model: PreTrainedModel, ids: torch.Tensor, folder: Path, after: int, patch: pytest.MonkeyPatch) -> None:
    """A search that is killed in measurement number `after`, the dense ones not counted."""
    measure, done = Sweep._measure, []

    def killed(self: Sweep, job: Any, *args: Any) -> Any:
        if job.key != "dense":
            if len(done) == after:
                raise KeyboardInterrupt
            done.append(job.key)
        return measure(self, job, *args)

    with patch.context() as inside:
        inside.setattr(Sweep, "_measure", killed)
        with pytest.raises(KeyboardInterrupt):
            greedy_removal(model, ids, 3, folder=folder)
    assert hooks_of(model) == 0
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("after", [2, 6, 13])
def test_a_later_run_does_no_job_twice(after: int, ids: torch.Tensor, tmp_path: Path, monkeypatch: Any) -> None:
    model = make_tiny("llama")
    wanted = greedy_removal(model, ids, 3)
    interrupted(model, ids, tmp_path, after, monkeypatch)
    measured, measure = [], Sweep._measure
    monkeypatch.setattr(
        Sweep, "_measure", lambda self, job, *args: measured.append(job.key) or measure(self, job, *args)
    )
    found = greedy_removal(model, ids, 3, folder=tmp_path)
    assert len([key for key in measured if key != "dense"]) == 6 + 5 + 4 - after
    assert_agree(found, [(step.layer, step.windows) for step in wanted.steps])
    np.testing.assert_array_equal(found.dense, wanted.dense)
    calls = computed(model)
    again = greedy_removal(model, ids, 3, folder=tmp_path)
    assert greedy_removal(model, ids, 2, folder=tmp_path).order == found.order[:2]
    assert not calls
    assert again.to_json() == found.to_json()


def test_a_search_goes_on_from_a_shorter_one(ids: torch.Tensor, tmp_path: Path) -> None:
    model = make_tiny("llama")
    short = greedy_removal(model, ids, 1, folder=tmp_path)
    found = greedy_removal(model, ids, 2, folder=tmp_path)
    assert_agree(found, [(step.layer, step.windows) for step in greedy_removal(model, ids, 2).steps])
    assert found.steps[0].forwards == short.steps[0].forwards


@pytest.mark.parametrize("what", ["text", "criterion", "protect", "remove"])
def test_a_search_of_something_else_takes_nothing_of_it(what: str, ids: torch.Tensor, tmp_path: Path) -> None:
    """A layer that was now to stay went: it had gone in the search that was kept."""
    model = make_tiny("llama")
    first = greedy_removal(model, ids, 1, folder=tmp_path)
    asked: dict[str, Any] = {"batch": ids, "remove": 2}
    asked |= {
        "text": {"batch": ids.flip(1)},
        "criterion": {"criterion": "other"},
        "protect": {"protect": first.order},
        "remove": {"remove": 3},
    }[what]
    found = greedy_removal(model, folder=tmp_path, **asked)
    assert_agree(found, [(step.layer, step.windows) for step in greedy_removal(model, **asked).steps])
    assert (first.order[0] in found.order) == (what != "protect") or what == "text"


def test_of_equal_losses_the_earlier_layer_goes(ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    with torch.no_grad():
        for layer in (1, 4):  # add nothing
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    found = greedy_removal(model, ids, 2, candidates=lambda removed: {4, 1} - {*removed})
    assert found.order == (1, 4)
    np.testing.assert_allclose(found.losses, found.losses[0], rtol=1e-6)
