"""A joint removal from end to end, on tiny models: what it writes, that it goes on after a kill, what it refuses."""

from __future__ import annotations

import math
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import interrupted_after, make_classifier, make_mixture, make_tiny
from transformers import AutoModelForImageClassification, PreTrainedModel

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.examples import slices as cut_in_three
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.score import score
from lyapunov_prune.healing import state as training_state
from lyapunov_prune.healing.distillation import Distillation, distillation_loss
from lyapunov_prune.joint import search as module
from lyapunov_prune.joint.points import Course
from lyapunov_prune.joint.recovery import RecoveryRecipe
from lyapunov_prune.joint.result import JointRun
from lyapunov_prune.joint.run import remove_jointly
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.results.history import add_step, read_history

CONTEXT = 24
QUICK: dict[str, Any] = {"steps": 1, "recover_steps": 2, "recipe": RecoveryRecipe(rank=2)}


def slices(seed: int = 0) -> tuple[TokenBatch, TokenBatch, TokenBatch]:
    generator = torch.Generator().manual_seed(seed)
    learn, select, final = (torch.randint(3, 97, (n, CONTEXT), generator=generator) for n in (10, 6, 6))
    names = zip((learn, select, final), ("learn", "select", "final"), strict=True)
    a, b, c = (TokenBatch(ids, name, "all", bos=False) for ids, name in names)
    return a, b, c


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that was never trained the selection set can tell nothing apart; that it says so has its own test."""
    monkeypatch.setattr(module, "_selection_error", lambda *_: 0.0)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the process that takes seconds to start: `test_compact_checkpoint` has it."""
    from lyapunov_prune.export import compact_gate

    verify = compact_gate.verify_compact
    monkeypatch.setattr(
        compact_gate, "verify_compact", lambda *args, **options: verify(*args, **options, elsewhere=False)
    )


def shallow() -> PreTrainedModel:
    """Three layers take few points."""
    return make_tiny("llama", num_hidden_layers=3)


def removed(model: PreTrainedModel, folder: Path, name: str = "out", **changes: Any) -> JointRun:
    options = {"remove": 2, **QUICK, "folder": folder / "jobs", **changes}
    return remove_jointly(model, None, options.pop("slices", slices()), folder / name, **options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"reduction": "affine", "recipe": RecoveryRecipe()}),
        ("gpt2", {"recipe": RecoveryRecipe(rank=2, optimizer="sgd"), "seeds": 1}),
    ],
)
def test_what_comes_out(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny(family)
    before = {name: p.clone() for name, p in model.named_parameters()}
    run = removed(model, tmp_path, **options)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert len(run.points.scores) == 12 + (0 if options.get("seeds") == 1 else 2)
    assert run.points.items.shape == (len(run.points.scores), 6)
    np.testing.assert_allclose(run.points.items.mean(1), run.points.scores)
    assert sum(run.decision.chosen) == 2
    assert tuple(map(len, (run.plan.gone.attention, run.plan.gone.activation))) == run.decision.chosen
    assert (run.plan.gone.attention, run.plan.gone.activation) == tuple(
        tuple(sorted(layers)) for layers in run.importance.first(*run.decision.chosen)
    )
    assert run.measured_on.text_hash == slices()[2].text_hash
    assert run.measured_on.text_hash not in {on.text_hash for on in run.points.measured_on}
    assert not (tmp_path / "jobs").exists()

    with quiet():
        from lyapunov_prune.models.compact import register
        from lyapunov_prune.models.folder import require_module

        require_module(tmp_path / "out")
        again = register(model.config.model_type).from_pretrained(tmp_path / "out")
    assert score(again, slices()[2]).value == pytest.approx(run.chosen, abs=1e-5)
    assert again.num_parameters() == run.parameters[1] < run.parameters[0] == model.num_parameters()
    assert run.size[1] < run.size[0]
    ratio = run.against_dense()
    assert ratio is not None
    assert ratio.value == pytest.approx(math.exp(run.dense - run.chosen))
    assert ratio.low < ratio.value < ratio.high
    loaded = JointRun.load(tmp_path / "out" / "joint.json")
    assert (loaded.decision.chosen, loaded.against_dense()) == (run.decision.chosen, ratio)
    assert PruningPlan.load(tmp_path / "out" / "plan.json").gone.activation == run.plan.gone.activation
    seen = {on.text for step in read_history(tmp_path / "out").steps for on in step.saw}
    assert seen == {"learn", "select"}


def test_a_mixture_has_no_activations_to_trade(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"layer 0 has experts .* drop its attention"):
        removed(make_mixture("mixtral"), tmp_path)


@pytest.mark.parametrize("family", ["vit", "deit"])
def test_a_classifier_of_images(family: str, tmp_path: Path) -> None:
    """Every attention may go."""
    generator = torch.Generator().manual_seed(0)
    pixels, labels = torch.randn(60, 1, 8, 8, generator=generator), torch.arange(60) % 5
    model = make_classifier(family)
    cut = cut_in_three(ImageBatch(pixels, labels, "noise", "all"))
    recipe = RecoveryRecipe(batch=4, rank=2)
    run = removed(model, tmp_path, remove=3, slices=cut, recipe=recipe)
    assert run.importance.items == 16 * 4
    assert run.measured_on.images
    assert run.against_dense() is None
    assert "top-1 accuracy" in run.headline()
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert score(again, cut.final).value == pytest.approx(run.chosen)
    assert again.num_parameters() == run.parameters[1]
    with pytest.raises(LyapunovPruneError, match="9 to remove"):
        removed(model, tmp_path, "more", remove=9, slices=cut, recipe=recipe)
    same = (cut.learn, cut.select, cut.select)
    with pytest.raises(LyapunovPruneError, match="share 15 images"):
        removed(model, tmp_path, "more", slices=same, recipe=recipe)


def same(a: JointRun, b: JointRun, folder: Path, names: tuple[str, str]) -> None:
    assert a.decision.to_json() == b.decision.to_json()
    assert np.array_equal(a.points.scores, b.points.scores)
    assert np.array_equal(a.losses, b.losses)
    assert len({(folder / name / "model.safetensors").read_bytes() for name in names}) == 1


@pytest.mark.parametrize("rank", [2, None])
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(rank: int | None, tmp_path: Path) -> None:
    """In a point in the middle, and in the final recovery; of each point and step nothing is done twice."""
    model = shallow()
    options = {"steps": 2, "recover_steps": 3, "recipe": RecoveryRecipe(rank=rank)}
    whole = removed(model, tmp_path, "whole", **options)
    steps = 2 * len(whole.points.scores) + 3
    taken = 0
    for stop in (9, steps - 1):
        with pytest.MonkeyPatch.context() as patch:
            interrupted_after(stop - taken, patch)
            with pytest.raises(KeyboardInterrupt):
                removed(model, tmp_path, **options)
        taken = stop
        assert not (tmp_path / "out").exists()
    with pytest.MonkeyPatch.context() as patch:
        interrupted_after(steps - taken, patch)  # one more would raise
        resumed = removed(model, tmp_path, **options)
    same(whole, resumed, tmp_path, ("whole", "out"))


def killed(folder: Path, after: int) -> None:
    take_step = Distillation.take_step
    left = [after]

    def kill(self: Distillation, inputs: torch.Tensor, rate: float) -> None:
        if not left[0]:
            os.kill(os.getpid(), 9)
        left[0] -= 1
        take_step(self, inputs, rate)

    Distillation.take_step = kill  # type: ignore[method-assign]
    training_state.SECONDS, training_state._SHARE = 0.0, math.inf
    removed(shallow(), folder)


def test_kill_9_in_a_point_and_in_the_final_recovery(tmp_path: Path) -> None:
    whole = removed(shallow(), tmp_path, "whole")
    for after in (7, len(whole.points.scores) - 7 + 1):
        process = multiprocessing.get_context("fork").Process(target=killed, args=(tmp_path, after))
        process.start()
        process.join()
        assert process.exitcode == -9
    same(whole, removed(shallow(), tmp_path), tmp_path, ("whole", "out"))


# What is refused.


def cut_off(model: PreTrainedModel, folder: Path, after: int = 9, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupted_after(after, patch)
        with pytest.raises(KeyboardInterrupt):
            removed(model, folder, **options)


def test_a_truncated_point_is_seen(tmp_path: Path) -> None:
    """Of a point that others inherit from: its tensors cut off, another point's in its place, and none at all."""
    model = shallow()
    cut_off(model, tmp_path, 2)
    state = next((tmp_path / "jobs").glob("*/1-0/*/step-*/state.safetensors"))
    whole = state.read_bytes()
    state.write_bytes(whole[:-100])
    with pytest.raises(LyapunovPruneError, match="damaged"):
        removed(model, tmp_path)
    state.write_bytes(next((tmp_path / "jobs").glob("*/2-0/*/step-*/state.safetensors")).read_bytes())
    with pytest.raises(LyapunovPruneError, match="is damaged or of another run"):
        removed(model, tmp_path)
    state.unlink()
    state.parent.rmdir()
    with pytest.raises(LyapunovPruneError, match=r"point \(1, 0\)"):
        removed(model, tmp_path)
    assert not (tmp_path / "out").exists()


def test_half_a_line_of_the_store_is_done_again(tmp_path: Path) -> None:
    model = shallow()
    whole = removed(model, tmp_path, "whole")
    cut_off(model, tmp_path)
    (store,) = (tmp_path / "jobs").rglob("*.jsonl")
    store.write_bytes(store.read_bytes()[:-20])
    same(whole, removed(model, tmp_path), tmp_path, ("whole", "out"))


def test_another_run_takes_nothing_of_the_work_that_it_finds_and_leaves_it(tmp_path: Path) -> None:
    model, other = shallow(), {"slices": slices(1)}
    cut_off(model, tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "jobs").rglob("*") if path.is_file()}
    found = removed(model, tmp_path, **other)
    assert all(path.read_bytes() == content for path, content in before.items())
    same(removed(model, tmp_path, "whole", **other), found, tmp_path, ("whole", "out"))


def test_work_is_kept_apart_by_whatever_it_depends_on(tmp_path: Path) -> None:
    changes: list[dict[str, Any]]
    changes = [{}, {"remove": 3}, {"steps": 2}, {"recipe": RecoveryRecipe(rank=3)}]
    for change in changes:
        cut_off(shallow(), tmp_path, 1, **change)
    assert len(list((tmp_path / "jobs").iterdir())) == len(changes)


def test_slices_that_share_data_are_refused(tmp_path: Path) -> None:
    learn, select, final = slices()
    model = make_tiny("llama")
    for given, told in (
        ((learn, select, select), "the select and the final slice share 144 tokens"),
        ((learn, learn, final), "the learn and the select slice share 240 tokens"),
        ((final, select, final), "the learn and the final slice share 144 tokens"),
    ):
        with pytest.raises(LyapunovPruneError, match=told):
            removed(model, tmp_path, slices=given)
    shifted = TokenBatch(torch.cat([final.ids[:, 1:], final.ids[:, :1]], 1), "shifted", "all", bos=False)
    long = [TokenBatch(b.ids.view(1, -1), b.text, b.split, b.bos) for b in (select, shifted)]
    with pytest.raises(LyapunovPruneError, match="select and the final"):
        removed(model, tmp_path, slices=(learn, long[0], replace(long[0], ids=long[0].ids[:, 3:])))
    assert not list(tmp_path.iterdir())


def test_a_final_slice_that_the_model_was_made_with_is_refused(tmp_path: Path) -> None:
    model, (_, _, final) = make_tiny("llama"), slices()
    add_step(model, "prune", [final.measured_on(model)], model)
    with pytest.raises(LyapunovPruneError, match=r"made with final .*about 144 of the 144"):
        removed(model, tmp_path)
    assert not list(tmp_path.iterdir())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"remove": 0}, "0 to remove"),
    ({"remove": 12}, "12 to remove"),
    ({"reduction": "identity"}, "reduction identity"),
    ({"steps": 0}, "steps"),
]


@pytest.mark.parametrize(("options", "told"), BAD)
def test_bad_input_is_a_line_and_writes_nothing(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=told):
        removed(make_tiny("llama"), tmp_path, **options)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_selection_that_errs_by_more_than_pairs_differ_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_selection_error", lambda *_: 9.0)
    with pytest.raises(LyapunovPruneError, match="error, 9"):
        removed(shallow(), tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_names_point_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    measured = distillation_loss

    def broken(*given: Any, **about: Any) -> tuple[float, torch.Tensor]:
        calls.append(given)
        loss, gradient = measured(*given, **about)
        return loss * math.nan if len(calls) == 4 else loss, gradient  # the second step of the second point

    monkeypatch.setattr("lyapunov_prune.healing.distillation.distillation_loss", broken)
    with pytest.raises(LyapunovPruneError, match=r"point \(2, 0\): the loss of step 1"):
        removed(shallow(), tmp_path, steps=2)


def test_half_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="in bfloat16"):
        removed(make_tiny("llama").bfloat16(), tmp_path)


def test_planted_fault_a_merge_of_the_wrong_layer_is_seen_by_the_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate compares a checkpoint with what it is told to be; that it is the recovered one, its score says."""
    from lyapunov_prune.merging.unmerged import Unmerged

    right = removed(shallow(), tmp_path, "right", remove=3, reduction="mean-gate")
    assert right.plan.gone.activation
    merged = Unmerged.merged

    def wrong(self: Unmerged, activation: Any) -> Any:
        found = merged(self, activation)
        if len(found) == len(self.blocks):
            return found
        others = merged(self, [(i + 1) % len(self.blocks) for i in activation])
        return dict(zip(found, others.values(), strict=True))

    monkeypatch.setattr(Unmerged, "merged", wrong)
    with pytest.raises(LyapunovPruneError, match="merged model"):
        removed(shallow(), tmp_path, "wrong", remove=3, reduction="mean-gate")


def test_a_final_recovery_that_does_not_pay_leaves_the_weights_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: what has learnt is made worse by noise, and is not what is written."""
    finish, taught = Course.finish, Course.taught
    kept: list[torch.Tensor] = []

    def worse(self: Course, *args: Any, **options: Any) -> Any:
        pupil, lesson, losses = finish(self, *args, **options)
        with torch.no_grad():
            for p in pupil.model.parameters():
                p += torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
        return pupil, lesson, losses

    def noted(self: Course, pair: Any) -> Any:
        student = taught(self, pair)
        kept.append(student.model.get_output_embeddings().weight.detach().clone())
        return student

    monkeypatch.setattr(Course, "finish", worse)
    monkeypatch.setattr(Course, "taught", noted)
    run = removed(shallow(), tmp_path)
    assert run.gain is not None
    assert run.gain.change > 0
    assert not run.gain.pays
    assert JointRun.load(tmp_path / "out" / "joint.json").gain == run.gain
    with quiet():
        from lyapunov_prune.models.compact import register

        again = register("llama").from_pretrained(tmp_path / "out")
    assert torch.equal(again.get_output_embeddings().weight, kept[-1])
