"""Healing: the student learns, nobody else changes, and an interrupted run ends as an uninterrupted one."""

from __future__ import annotations

import copy
import dataclasses
import math
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import hooks_of, launched_twice, make_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
from lyapunov_prune.healing import heal as heal_module
from lyapunov_prune.healing import state as training_state
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.heal import Healed, Healing, HeldOut, heal
from lyapunov_prune.pruning.removal import remove_layers


def pair(family: str = "llama", **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A dense model and what is left without layers 1 and 3."""
    teacher = make_tiny(family, **changes)
    return remove_layers(teacher, [1, 3]), teacher


@pytest.fixture
def heldout() -> TokenBatch:
    ids = torch.randint(97, (4, 40), generator=torch.Generator().manual_seed(2))
    return TokenBatch(ids, "other ids", "evaluation", bos=False)


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(p, second[name]) for name, p in first.items())


def test_held_out_windows_go_together_if_asked(
    ids: torch.Tensor, heldout: TokenBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(*args: Any, batch_size: int, **options: Any) -> Perplexity:
        sizes.append(batch_size)
        return perplexity(*args, batch_size=batch_size, **options)

    monkeypatch.setattr(heal_module, "perplexity", counted)
    heal(*pair(), ids, steps=1, evaluation=heldout, batch_size=2)
    assert sizes == [2, 2, 2]  # before, dense, healed


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("rank", [None, 4])
def test_a_healed_model_is_nearer_to_the_dense_one_and_a_plain_model(
    family: str, rank: int | None, ids: torch.Tensor, heldout: TokenBatch, tmp_path: Path
) -> None:
    student, teacher = pair(family)
    student.train()  # GPT-2's dropout must not be learnt
    student.lm_head.weight.requires_grad_(False)
    before, dense = weights(student), weights(teacher)
    out = heal(student, teacher, ids, steps=12, rank=rank, learning_rate=3e-3, evaluation=heldout)
    model, report = out.model, out.report

    assert report.losses.shape == (12,)
    assert report.losses[-3:].mean() < 0.8 * report.losses[:3].mean()
    assert all(torch.equal(p, before[name]) for name, p in student.named_parameters())
    assert all(torch.equal(p, dense[name]) and p.grad is None for name, p in teacher.named_parameters())
    assert student.training
    assert hooks_of(model) == 0

    assert [n for n, _ in model.named_parameters()] == list(before)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in student.parameters()]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    inside = {n for n in before if ".layers." in n or ".h." in n}
    assert moved == (inside if rank is None else {n for n in inside if before[n].ndim == 2})
    if rank is None:
        assert report.trained == sum(before[n].numel() for n in inside)
    else:
        assert report.trained == sum(rank * sum(before[n].shape) for n in moved)

    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == (family == "gpt2")

    assert report.held_out is not None
    found = [p.value for p in (report.held_out.before, report.held_out.after, report.held_out.teacher)]
    assert found == [perplexity(m, heldout).value for m in (student.eval(), model, teacher)]
    assert report.recovered is not None
    if found[0] > found[2]:
        assert report.recovered == pytest.approx((found[0] - found[1]) / (found[0] - found[2]))
    assert str(report)
    assert Healing.load(report.save(tmp_path / "healing.json")).recovered == pytest.approx(
        report.recovered, nan_ok=True
    )


@pytest.mark.parametrize(
    ("before", "after", "dense", "recovered"),
    [(24.0, 18.0, 14.0, 0.6), (24.0, 26.0, 14.0, -0.2), (24.0, 12.0, 14.0, 1.2), (14.0, 13.0, 14.0, math.nan)],
)
def test_recovered_is_the_share_of_the_perplexity_that_removal_cost(
    before: float, after: float, dense: float, recovered: float, ids: torch.Tensor, tmp_path: Path
) -> None:
    student, teacher = pair()
    report = heal(student, teacher, ids, steps=1).report
    measured = perplexity(student, ids)
    held_out = HeldOut(*(dataclasses.replace(measured, nll=math.log(value)) for value in (before, after, dense)))
    report = Healing.load(dataclasses.replace(report, held_out=held_out).save(tmp_path / "healing.json"))
    assert report.recovered == pytest.approx(recovered, nan_ok=True)


def test_without_evaluation_nothing_is_said_of_recovery(ids: torch.Tensor) -> None:
    student, teacher = pair()
    report = heal(student, teacher, ids, steps=1).report
    assert report.recovered is None
    assert "perplexity" not in report.summary()


def test_the_losses_of_both_ends_are_those_of_a_tenth_of_the_steps(ids: torch.Tensor) -> None:
    """A tenth of 25 steps is three of them, at either end."""
    report = dataclasses.replace(heal(*pair(), ids, steps=1).report, losses=np.arange(25.0))
    row = report.summary().iloc[0]
    assert (row["steps"], row["first losses"], row["last losses"]) == (25, 1.0, 23.0)


def test_windows_come_in_a_drawn_order_each_once_before_any_twice(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bytes] = []

    def note(self: Distillation, window: torch.Tensor) -> None:
        taken.append(window.numpy().tobytes())
        self.losses.append(0.0)

    monkeypatch.setattr(Distillation, "take_step", note)
    student, teacher = pair()
    orders = set()
    for seed in range(6):
        taken.clear()
        heal(student, teacher, ids, steps=7, seed=seed)
        assert len(set(taken[:3])) == len(set(taken[3:6])) == 3
        orders.add(tuple(taken))
    assert len(orders) > 1


# Interrupted.

SETTINGS: dict[str, Any] = {"steps": 8, "learning_rate": 3e-3, "seed": 3}


def interrupted_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a run is interrupted before this step, whose state is kept."""
    take_step = Distillation.take_step

    def interrupt(self: Distillation, window: torch.Tensor) -> None:
        if self.step == step:
            raise KeyboardInterrupt
        take_step(self, window)

    monkeypatch.setattr(Distillation, "take_step", interrupt)
    monkeypatch.setattr(training_state, "SECONDS", 0.0)
    monkeypatch.setattr(training_state, "_SHARE", math.inf)


@pytest.mark.parametrize("rank", [None, 3])
def test_an_interrupted_run_ends_as_an_uninterrupted_one_bit_for_bit(
    rank: int | None, ids: torch.Tensor, tmp_path: Path
) -> None:
    student, teacher = pair()
    whole = heal(student, teacher, ids, rank=rank, **SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        interrupted_at(5, patch)
        with pytest.raises(KeyboardInterrupt):
            heal(student, teacher, ids, rank=rank, folder=tmp_path, **SETTINGS)
    assert [path.name for path in tmp_path.glob("*step-*")] == ["step-5"]
    taken: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        take_step = Distillation.take_step
        patch.setattr(Distillation, "take_step", lambda self, w: (taken.append(self.step), take_step(self, w)))
        resumed = heal(student, teacher, ids, rank=rank, folder=tmp_path, resume=True, **SETTINGS)
        assert taken == [5, 6, 7]
        done = heal(student, teacher, ids, rank=rank, folder=tmp_path, resume=True, **SETTINGS)
        assert taken == [5, 6, 7]
    for other in (resumed, done):
        assert same(other.model, whole.model)
        assert np.array_equal(other.report.losses, whole.report.losses)


def child(folder: Path, ids: torch.Tensor) -> None:
    training_state.SECONDS, training_state._SHARE = 0.0, math.inf
    heal(*pair(), ids, folder=folder, resume=True, **SETTINGS)


def test_a_killed_run_goes_on_to_the_same_end(ids: torch.Tensor, tmp_path: Path) -> None:
    """kill -9 at growing delays after a state appears: in the middle of steps, of writing, of deleting."""
    context, kills = multiprocessing.get_context("fork"), 0
    while True:
        before = set(tmp_path.iterdir())
        process = context.Process(target=child, args=(tmp_path, ids))
        process.start()
        while process.is_alive() and set(tmp_path.glob("step-*")) <= before:
            process.join(0.0005)
        process.join(0.004 * kills)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -9
        kills += 1
    assert kills >= 2
    resumed = heal(*pair(), ids, folder=tmp_path, resume=True, **SETTINGS)
    assert same(resumed.model, heal(*pair(), ids, **SETTINGS).model)


def test_a_state_of_another_run_is_refused(ids: torch.Tensor, tmp_path: Path) -> None:
    student, teacher = pair()

    def resume(a: PreTrainedModel, b: PreTrainedModel, ids: torch.Tensor, **changes: Any) -> Healed:
        return heal(a, b, ids, folder=tmp_path, resume=True, **{"steps": 1, "rank": 2, **changes})

    resume(student, teacher, ids)
    other = [copy.deepcopy(m) for m in (student, teacher)]
    for model in other:
        model.model.layers[2].mlp.down_proj.weight.data[3, 3] += 1  # no weight that the identity samples
    for arguments, changes, what in [
        ((other[0], teacher, ids), {}, "model"),
        ((student, other[1], ids), {}, "teacher"),
        ((student, teacher, ids[:2]), {}, "text_hash"),
        ((student, teacher, ids), {"rank": 3}, "rank"),
        ((student, teacher, ids), {"steps": 2}, "steps"),
        ((student, teacher, ids), {"seed": 1}, "seed"),
        ((student, teacher, ids), {"temperature": 2.0}, "temperature"),
        ((student, teacher, ids), {"learning_rate": 1.0}, "learning_rate"),
    ]:
        with pytest.raises(LyapunovPruneError, match=f"measured on another {what} .*; run without --resume"):
            resume(*arguments, **changes)
    assert resume(student, teacher, ids).report.steps == 1


# Memory.


def test_half_precision_is_healed_by_float32_factors_beside_weights_that_are_not_copied(ids: torch.Tensor) -> None:
    student, teacher = (model.to(torch.bfloat16) for model in pair())
    before = weights(student)
    done = heal(student, teacher, ids, steps=30, rank=2, learning_rate=1e-2)
    assert {p.dtype for p in done.model.parameters()} == {torch.bfloat16}
    assert done.report.losses[-3:].mean() < 0.8 * done.report.losses[:3].mean()
    assert all(torch.equal(p, before[name]) for name, p in student.named_parameters())
    for (name, mine), theirs in zip(done.model.named_parameters(), student.parameters(), strict=True):
        trained = "_proj" in name
        assert (mine.data_ptr() == theirs.data_ptr()) != trained, name
        assert mine is not theirs
        assert mine.requires_grad == theirs.requires_grad


@pytest.mark.parametrize("rank", [None, 2])
def test_layers_that_run_again_give_the_same_student_to_the_last_bit(rank: int | None, ids: torch.Tensor) -> None:
    kept: dict[bool, int] = {}
    done: dict[bool, Healed] = {}
    for checkpointing in (False, True):
        counted: list[int] = []

        def note(tensor: torch.Tensor, counted: list[int] = counted) -> torch.Tensor:
            counted.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            done[checkpointing] = heal(*pair(), ids, steps=3, rank=rank, checkpointing=checkpointing)
        kept[checkpointing] = sum(counted)
    assert same(done[True].model, done[False].model)
    assert np.array_equal(done[True].report.losses, done[False].report.losses)
    assert kept[True] < kept[False] / 3
    assert not any("forward" in module.__dict__ for module in done[True].model.modules())


# Refused.


def test_what_cannot_be_healed_is_refused_in_one_line(ids: torch.Tensor) -> None:
    student, teacher = pair()
    half = copy.deepcopy(student).to(torch.bfloat16)
    stranger = make_tiny("llama", vocab_size=101)
    for arguments, changes, message in [
        ((half, teacher, ids), {}, r"is in bfloat16, .*; load it in float32, or heal by .* \(--update-rank\)"),
        ((student, stranger, ids), {}, "a vocabulary of 97 and the dense one of 101; give the dense model"),
        ((student, teacher, ids + 60), {}, "outside the model's vocabulary"),
        ((student, teacher, ids[:0]), {}, "token ids of shape"),
        ((student, teacher, ids), {"steps": 0}, "0 steps heal nothing"),
        ((student, teacher, ids), {"per_step": 0}, r"steps of 0 windows cannot be shared by 1 .*; give as many"),
        ((student, teacher, ids), {"steps": 10**9}, "would take 1,000,000,000 windows; give fewer, 10,000,000 at"),
        ((student, teacher, ids), {"rank": 0}, "rank 0 for"),
        ((student, teacher, ids), {"learning_rate": 0.0}, "learning rate 0; give a positive number"),
        ((student, teacher, ids), {"learning_rate": math.nan}, "learning rate nan; give a positive number"),
        ((student, teacher, ids), {"temperature": -1.0}, "temperature -1 is no temperature; give a number above 0"),
        ((student, teacher, ids), {"evaluation": ids[1:2]}, "share 40 tokens in a row"),
    ]:
        with pytest.raises(LyapunovPruneError, match=message) as raised:
            heal(*arguments, **{"steps": 1, **changes})
        assert "\n" not in str(raised.value)


def test_a_run_that_explodes_says_where_and_changes_nobody(ids: torch.Tensor) -> None:
    student, teacher = pair()
    before = weights(student)
    with pytest.raises(LyapunovPruneError, match=r"of step [1-9] is not finite; lower the learning rate"):
        heal(student, teacher, ids, steps=9, learning_rate=1e30)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in student.named_parameters())
    assert hooks_of(student) == 0


def test_healing_works_where_gradients_are_off(ids: torch.Tensor) -> None:
    student, teacher = pair()
    with torch.no_grad():
        assert not same(heal(student, teacher, ids, steps=1).model, student)


# Several windows a step, several processes.


def test_the_windows_of_a_step_follow_the_order_that_single_ones_have(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.Tensor] = []

    def note(self: Distillation, windows: torch.Tensor) -> None:
        taken.append(windows)
        self.losses.append(0.0)

    monkeypatch.setattr(Distillation, "take_step", note)
    heal(*pair(), ids, steps=6)
    alone = torch.cat(taken)
    taken.clear()
    report = heal(*pair(), ids, steps=3, per_step=2).report
    assert [len(windows) for windows in taken] == [2, 2, 2]
    assert torch.equal(torch.cat(taken), alone)
    assert report.per_step == 2
    assert "2 windows a step" in report.headline()


SCRIPT = """
import sys
sys.path[:0] = {tests!r}
import math, os, torch
from pathlib import Path
from healing.test_heal import SHARED, interrupted_at, pair
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.heal import heal
import pytest
folder, rank = Path({folder!r}), os.environ["RANK"]
ids = torch.randint(97, (3, 40), generator=torch.Generator().manual_seed(1))
with pytest.MonkeyPatch.context() as patch:
    interrupted_at(3, patch)
    try:
        heal(*pair(), ids, folder=folder / "state", **SHARED)
        raise SystemExit(1)
    except KeyboardInterrupt:
        pass
torch.distributed.barrier()
done = heal(*pair(), ids, folder=folder / "state", resume=True, **SHARED)
torch.save((done.model.state_dict(), done.report.losses), folder / f"{{rank}}.pt")
try:
    heal(*pair(), ids, steps=1)
except Exception as error:
    (folder / f"{{rank}}.txt").write_text(str(error))
"""
SHARED: dict[str, Any] = {"steps": 5, "per_step": 3, "learning_rate": 3e-3}


@pytest.mark.slow
def test_two_processes_end_with_the_student_of_one_and_go_on_as_one(ids: torch.Tensor, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=[str(p) for p in Path(__file__).parents[1:3]], folder=str(tmp_path)))
    done = launched_twice(script)
    assert done.returncode == 0, done.stderr
    alone = heal(*pair(), ids, **SHARED)
    (mine, losses), (other, others) = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in "01")
    assert np.array_equal(losses, others)
    np.testing.assert_allclose(losses, alone.report.losses, rtol=1e-4)
    for name, p in alone.model.state_dict().items():
        assert torch.equal(mine[name], other[name])
        torch.testing.assert_close(mine[name], p, rtol=0, atol=2e-4)
    for rank in "01":
        assert "steps of 1 windows cannot be shared by 2" in (tmp_path / f"{rank}.txt").read_text()
