"""Experiments on recovered models: rivals of a choice, equal time, reductions. Alike recovered, on the final slice."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import digits, interrupted_after, make_classifier, make_tiny
from scipy import stats

import lyapunov_prune as lp
from experiments import recoveries
from experiments.recoveries import Subject, difference, finished, together, told
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.examples import slices
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.joint.chains import chains
from lyapunov_prune.joint.decision import decide
from lyapunov_prune.joint.importance import Importance
from lyapunov_prune.joint.map import fit_map
from lyapunov_prune.joint.points import Points
from lyapunov_prune.joint.recovery import RecoveryRecipe
from lyapunov_prune.joint.result import JointRun
from lyapunov_prune.models.structure import identify
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import PartsGone

RIVALS = importlib.import_module("experiments.5_joint.rivals.run")
EQUAL = importlib.import_module("experiments.5_joint.equal_time.run")
REDUCTIONS = importlib.import_module("experiments.5_joint.reductions_recovered.run")
L, STEPS = 4, 1


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    model = make_classifier("vit")
    model.config._name_or_path = "tiny"
    monkeypatch.setattr(recoveries, "IMAGES", 4)
    monkeypatch.setattr(EQUAL, "IMAGES", 4)
    monkeypatch.setattr(recoveries, "FINISHED", tmp_path)
    return Subject(model, slices(digits(60)), tmp_path / "jobs")


@pytest.fixture
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    model = make_tiny("llama", num_hidden_layers=L)
    model.config._name_or_path = "tiny"
    monkeypatch.setattr(recoveries, "FINISHED", tmp_path)
    ids = torch.randint(3, 97, (20, 24), generator=torch.Generator().manual_seed(0))
    return Subject(model, slices(TokenBatch(ids, "noise", "all", bos=False)), tmp_path / "jobs")


def joint(of: Subject) -> JointRun:
    """A run whose map gives up attentions first."""
    most = (L - 1 if of.model.can_generate() else L, L)
    pairs = np.array(list(chains(4, most)))
    rng = np.random.default_rng(0)
    scores = 0.9 + pairs @ np.array([-0.1, -0.2]) / L + 1e-3 * rng.normal(size=len(pairs))
    learn, select, final = (part.measured_on(of.model) for part in of.data)
    reduction = "mean-gate" if of.model.can_generate() else "identity"
    worth = Importance("taylor", reduction, 4, rng.random(L), rng.random(L), (learn,))
    count = len(pairs)
    points = Points(
        layers=L,
        steps=STEPS,
        recipe=RecoveryRecipe(batch=of.recipe.batch, rank=2),
        pairs=pairs,
        seeds=np.zeros(count, int),
        scores=scores,
        items=np.tile(scores, (3, 1)).T,
        losses=np.zeros((count, 2)),
        seconds=np.zeros(count),
        measured_on=(learn, select),
    )
    fitted = fit_map((pairs / L).tolist(), scores.tolist())
    decision = decide(fitted, L, remove=4, most=most, selection_error=0.0)
    plan = PruningPlan(
        gone=PartsGone((), (0,)),
        criterion="joint",
        alpha=None,
        scores=np.empty(0),
        model=identify(of.model),
        measured_on=(learn, select),
    )
    run = JointRun(
        importance=worth,
        points=points,
        map=fitted,
        decision=decision,
        plan=plan,
        start=(4, 0),
        losses=np.zeros(2),
        dense=1.0,
        chosen=0.5,
        error=0.1,
        parameters=(2, 1),
        size=(2, 1),
        seconds={},
        measured_on=final,
    )
    run.save(recoveries.FINISHED / "tiny.json")
    return run


def test_differences_are_paired_by_item() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 3, 20)) + np.linspace(0, 9, 20)
    found = difference(a, b)
    reference = stats.ttest_rel(a.mean(0), b.mean(0)).confidence_interval()
    np.testing.assert_allclose(found, ((a - b).mean(), reference.low, reference.high))
    shuffled = difference(a, b[:, np.random.default_rng(1).permutation(20)])
    assert shuffled[2] - shuffled[1] > 3 * (found[2] - found[1])
    assert [told((1, 0.5, 2)), told((-1, -2, -0.5)), told((0, -1, 1))] == [
        "better",
        "worse",
        "no significant difference",
    ]


def test_what_was_not_scored_on_the_final_slice_is_refused(tiny: Subject) -> None:
    row = tiny.scored(tiny.model)
    assert together([[row, row]], tiny.final).shape == (1, 2, len(tiny.data.final))
    other = replace(tiny, data=tiny.data._replace(final=tiny.data.select)).scored(tiny.model)
    with pytest.raises(LyapunovPruneError, match="final slice"):
        together([[row, other]], tiny.final)


def test_a_run_that_has_seen_the_final_slice_or_another_model_is_refused(tiny: Subject) -> None:
    joint(tiny)
    finished(tiny)
    swapped = replace(tiny, data=tiny.data._replace(final=tiny.data.select))
    with pytest.raises(LyapunovPruneError, match=r"15 .*\(select\)"):
        finished(swapped)
    with torch.no_grad():
        next(tiny.model.parameters()).add_(1)
    with pytest.raises(LyapunovPruneError, match="another tiny"):
        finished(tiny)


def test_rivals_are_ends_neighbours_and_others(tiny: Subject) -> None:
    at_an_end = RIVALS.rivals(joint(tiny), 1)
    assert list(at_an_end.items())[:3] == [((4, 0), "chosen"), ((0, 4), "end"), ((3, 1), "neighbour")]
    assert len(at_an_end) == 4
    run = joint(tiny)
    inside = replace(run, decision=replace(run.decision, predicted=np.array([0.1, 0.2, 0.3, 0.2, 0.1])))
    every = RIVALS.rivals(inside, 9)
    assert every == {
        (2, 2): "chosen",
        (0, 4): "end",
        (4, 0): "end",
        (1, 3): "neighbour",
        (3, 1): "neighbour",
    }
    found = RIVALS.parents(run, list(every))
    assert all(found[pair] in {(0, 0), *found} for pair in found)
    assert {abs(np.subtract(pair, before)).sum() for pair, before in found.items()} == {1}


def test_rivals_take_as_many_steps_and_go_on_after_a_kill(tiny: Subject, tmp_path: Path) -> None:
    run = joint(tiny)
    before = {name: p.clone() for name, p in tiny.model.named_parameters()}
    whole = RIVALS.measure(tiny, 1, 2, None)
    assert (whole.steps == 4 * STEPS + 2).all()
    assert whole.items.shape == (4, 2, len(tiny.data.final))
    assert (whole.last, whole.stated, whole.roles[0]) == (2, 0.5, "chosen")
    np.testing.assert_allclose(whole.refits.sum(1), 1)
    assert all(torch.equal(p, before[name]) for name, p in tiny.model.named_parameters())
    other = replace(tiny, jobs=tmp_path / "again")
    with pytest.MonkeyPatch.context() as patch:
        interrupted_after(17, patch)
        with pytest.raises(KeyboardInterrupt):
            RIVALS.measure(other, 1, 2, None)
    with pytest.MonkeyPatch.context() as patch:
        interrupted_after(whole.steps.size * 6, patch)
        again = RIVALS.measure(other, 1, 2, None)
    np.testing.assert_array_equal(again.items, whole.items)
    assert not list((tmp_path / "again").rglob("state.safetensors"))
    with pytest.raises(LyapunovPruneError, match="rivals took 6 to 7"):
        replace(whole, steps=whole.steps + np.eye(4, 2, dtype=int))
    assert run.decision.chosen == tuple(whole.pairs[0])


def by_parts(models: list[Any], inputs: torch.Tensor, repeats: int) -> np.ndarray:
    """Seconds as if a layer took 10, of which its attention 3 and the merged block saves 4."""
    rows = []
    for model in models:
        cuts = getattr(model.config, "cuts", [])
        saved = sum(3 * ("none" in c.values()) + 4 * bool({"affine", "linear"} & set(c.values())) for c in cuts)
        rows.append([10.0 * model.config.num_hidden_layers - saved] * repeats)
    return np.array(rows)


def test_every_way_takes_the_fewest_parts_that_are_fast_enough(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    joint(tiny)
    monkeypatch.setattr(EQUAL, "seconds", by_parts)
    before = {name: p.clone() for name, p in tiny.model.named_parameters()}
    found = EQUAL.measure(tiny, (1.1, 1.35), 2, 2, 3)
    assert all(torch.equal(p, before[name]) for name, p in tiny.model.named_parameters())
    took = {(way.speedup, way.name): tuple(map(len, way.parts)) for way in found.ways}
    assert took[1.1, "attentions"] == (2, 0, 0)
    assert took[1.1, "activations"] == (0, 1, 0)
    assert took[1.1, "layers by influence"] == took[1.1, "layers by importance"] == (0, 0, 1)
    assert took[1.1, "joint"] == (2, 0, 0)  # the map gives up attentions first
    assert took[1.35, "activations"] == (0, 3, 0)
    assert took[1.35, "joint"] == (4, 0, 0)
    assert {way.beside >= way.speedup for way in found.ways} == {True}
    assert found.missed == {}
    far = EQUAL.measure(tiny, (2.0,), 2, 2, 3)
    assert far.missed == {"joint 2": 40 / 28, "attentions 2": 40 / 28, "activations 2": 40 / 24} | {
        "joint 2": far.missed["joint 2"]
    }
    assert {way.name for way in far.ways} == {"layers by influence", "layers by importance"}
    with pytest.raises(LyapunovPruneError, match="ways took 2 to 3"):
        replace(found, ways=(replace(found.ways[0], steps=np.array([2, 3])), *found.ways[1:]))


def test_the_teacher_stays_whole_while_another_is_cut(tiny: Subject) -> None:
    student, pixels = tiny.student("identity"), tiny.data.learn.pixels[:2]
    whole = uncached_logits(tiny.model, pixels)
    for parts in (((0, 1), (2,), ()), ((), (), (1, 2))):
        with EQUAL.cut(student, parts) as model:
            assert torch.equal(uncached_logits(student.model, pixels), whole)
            assert not torch.allclose(uncached_logits(model, pixels), whole)


def test_a_decoder_goes_the_same_ways(decoder: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated blocks, one attention that must stay, windows of text for images."""
    monkeypatch.setattr(EQUAL, "seconds", by_parts)
    joint(decoder)
    rivals = RIVALS.measure(decoder, 0, 1, 1)
    assert [tuple(pair) for pair in rivals.pairs.tolist()] == [(3, 1), (0, 4), (2, 2)]
    assert (rivals.steps == 4 * STEPS + 1).all()
    ways = EQUAL.measure(decoder, (1.25,), 1, 1, 3)
    assert {way.name: tuple(map(len, way.parts)) for way in ways.ways} == {
        "joint": (3, 0, 0),
        "attentions": (3, 0, 0),
        "activations": (0, 2, 0),
        "layers by influence": (0, 0, 1),
        "layers by importance": (0, 0, 1),
    }
    np.testing.assert_allclose(
        EQUAL.influence(decoder), lp.block_influence(decoder.model, decoder.data.learn).influence, rtol=1e-6
    )
    found = REDUCTIONS.measure(decoder, (2,), 1, 1)
    assert (found.blocks, found.default) == ("gated", "mean-gate")
    assert found.reductions == ("mean-gate", "scaled", "affine")


def test_reductions_replace_the_same_layers(tiny: Subject) -> None:
    before = {name: p.clone() for name, p in tiny.model.named_parameters()}
    found = REDUCTIONS.measure(tiny, (1, 3), 2, 2)
    assert all(torch.equal(p, before[name]) for name, p in tiny.model.named_parameters())
    assert (found.blocks, found.default, found.reductions) == ("plain", "identity", ("identity", "affine"))
    assert found.counts == (1, 3)
    assert set(found.of("affine", 1).layers) < set(found.of("affine", 3).layers)
    student = tiny.student("affine")
    with student.cut((), found.of("affine", 3).layers) as model:
        np.testing.assert_array_equal(tiny.scored(model)["items"], found.of("affine", 3).before)
    others = tuple({0, 1, 2, 3} - set(found.replaced[0].layers))[:1]
    with pytest.raises(LyapunovPruneError, match="replaced 1"):
        replace(found, replaced=(replace(found.replaced[0], layers=others), *found.replaced[1:]))
    with pytest.raises(LyapunovPruneError, match="reductions took 2 to 5"):
        replace(found, replaced=(replace(found.replaced[0], steps=np.array([2, 5])), *found.replaced[1:]))


def test_reductions_are_held_against_the_plainest(tiny: Subject) -> None:
    found = REDUCTIONS.measure(tiny, (1,), 1, 1)
    items = found.of("identity", 1).after
    ramp = 0.01 * np.arange(items.shape[1])

    def moved(by: float) -> str:
        rows = tuple(replace(r, after=items + (by + ramp if r.reduction == "affine" else 0)) for r in found.replaced)
        row = next(
            line for line in REDUCTIONS.against(replace(found, replaced=rows)).splitlines() if "`affine`" in line
        )
        return row.rpartition(",")[2].strip(" |")

    assert [moved(by) for by in (1.0, -2.0, -float(ramp.mean()))] == ["better", "worse", "no significant difference"]


def test_the_numbers_on_the_choice_follow_the_scores(tiny: Subject) -> None:
    joint(tiny)
    found = RIVALS.measure(tiny, 1, 1, None)
    flat = np.tile(0.01 * np.arange(found.items.shape[-1]), (4, 1, 1))
    first = RIVALS.numbers(replace(found, items=flat - np.array([0, 1, 1, 1])[:, None, None]))
    assert (first["better"], first["worse"], first["regret"].split()[0]) == ("3", "0", "+0")
    second = RIVALS.numbers(replace(found, items=flat + np.array([0, 1, 0, 0])[:, None, None]))
    assert (second["better"], second["worse"], second["regret"].split()[0]) == ("0", "1", "+1")
