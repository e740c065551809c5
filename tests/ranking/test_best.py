"""`best` goes by the loss of physical removals on windows that no score has seen, within what it may spend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, computed, hooks_of, make_tiny
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.evaluation.judging import compare
from lyapunov_prune.forward.reading import read
from lyapunov_prune.mending import judge as judge_module
from lyapunov_prune.mending.mend import fit_mends
from lyapunov_prune.mending.report import pays
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.ranking import BestRemoval, best_removal, candidates
from lyapunov_prune.ranking import best as module
from lyapunov_prune.ranking import search as search_module
from lyapunov_prune.ranking.search import PART
from lyapunov_prune.ranking.tried import mended
from lyapunov_prune.sensitivity.sweep import Job, Sweep

REMOVE = 2
CHECKED = [1, 2, 4, 5, 8, 11]  # of 12 windows, the ends of four stretches
SCORED = [0, 3, 6, 7, 9, 10]


@pytest.fixture(scope="module")
def many() -> torch.Tensor:
    return torch.randint(97, (12, 24), generator=torch.Generator().manual_seed(1))


def with_idle(*layers: int) -> PreTrainedModel:
    """A model in which these layers add nothing."""
    model = make_tiny("llama")
    for index in layers:
        layer: Any = find_structure(model).layers[index]
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def own_words(model: PreTrainedModel, windows: int = 12) -> torch.Tensor:
    """What the model itself would write, so that any change of it costs."""
    begins = torch.randint(97, (windows, 2), generator=torch.Generator().manual_seed(1))
    return model.generate(begins, max_new_tokens=22, min_new_tokens=22, do_sample=False)


def require_honest(model: PreTrainedModel, many: torch.Tensor, found: BestRemoval) -> None:
    """Losses are those of physical removals on the check windows, and the least is chosen."""
    np.testing.assert_allclose(found.dense, lp.perplexity(model, many[CHECKED]).windows, rtol=1e-5)
    for tried in found.tried:
        small = lp.remove_layers(model, tried.layers)
        np.testing.assert_allclose(tried.windows, lp.perplexity(small, many[CHECKED]).windows, rtol=1e-5)
    means = [tried.windows.mean() for tried in found.tried]
    assert found.chosen == means.index(min(means))
    assert found.measured_on.text_hash != found.checked_on.text_hash
    assert len({tried.layers for tried in found.tried}) == len(found.tried)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_goes_by_the_losses_of_physical_removals(name: str, many: torch.Tensor) -> None:
    model = make_tiny(name)
    found = best_removal(model, many, REMOVE, search=40, batch_size=2)
    require_honest(model, many, found)
    assert hooks_of(model) == 0
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_swaps_find_what_no_criterion_proposes(many: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that do nothing; the one set proposed holds neither."""
    monkeypatch.setattr(module, "by_direction", lambda *args: {"bad": (0, 3)})
    monkeypatch.setattr(module, "SOURCES", {})
    monkeypatch.setattr(search_module, "SOURCES", {})
    model = with_idle(1, 4)
    words = own_words(model)
    found = best_removal(model, words, REMOVE, search=60)
    require_honest(model, words, found)
    assert found.remove == (1, 4)
    assert "bad" in [tried.by for tried in found.tried if tried.layers == (0, 3)]
    np.testing.assert_allclose(found.tried[found.chosen].windows, found.dense, rtol=1e-5)


# Compared mended.


@pytest.fixture(scope="module")
def other() -> torch.Tensor:
    return torch.randint(97, (5, 16), generator=torch.Generator().manual_seed(2))


def require_mended(model: PreTrainedModel, many: torch.Tensor, other: torch.Tensor, found: BestRemoval) -> None:
    """Losses are those of models mended on the scored windows alone, on the check windows and the other text."""
    assert found.finals
    best = sorted(found.tried, key=lambda tried: tried.windows.mean())
    assert [each.layers for each in found.finals] == [tried.layers for tried in best[: len(found.finals)]]
    totals = {}
    for each, tried in zip(found.finals, best, strict=False):
        small, bare = lp.mend(model, each.layers, many[SCORED]), lp.remove_layers(model, each.layers)
        wanted = [lp.perplexity(m, text).windows for m in (bare, small) for text in (many[CHECKED], other)]
        found_ = [tried.windows, each.other, each.mended, each.other_mended]
        for a, b in zip(found_, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4)
        kept = pays(compare(wanted[0], wanted[2]), compare(wanted[1], wanted[3]))
        totals[each.layers] = sum(w.mean() for w in (wanted[2:] if kept else wanted[:2]))
        assert mended(each, tried.windows) == kept
    assert found.remove == min(totals, key=lambda layers: totals[layers])


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_sets_are_compared_mended_and_not(name: str, many: torch.Tensor, other: torch.Tensor) -> None:
    """The search goes before it; layer 0 stays, and the table names what was mended."""
    model = make_tiny(name)
    found = best_removal(model, many, REMOVE, search=40, mend=True, judge=other, protect=[-1])
    require_mended(model, many, other, found)
    assert found.protected == (0, LAYERS - 1)
    assert any(tried.swap for tried in found.tried)
    assert found.forwards == found.finals[-1].forwards <= 40
    assert found.to_frame()["mended"].notna().sum() == len(found.finals) == 4
    assert "Of 4 compared mended and not" in found.headline()
    assert hooks_of(model) == 0


def test_half_of_the_forwards_find_the_sets_that_are_mended(many: torch.Tensor, other: torch.Tensor) -> None:
    """So the best unmended set that the same search finds without mending stays in the race."""
    model = make_tiny("llama")
    plain = best_removal(model, many, REMOVE, search=15, protect=[0])
    found = best_removal(model, many, REMOVE, search=30, mend=True, judge=other)
    assert [t.layers for t in found.tried] == [t.layers for t in plain.tried]
    assert plain.remove in [final.layers for final in found.finals]


def test_a_map_that_fits_its_text_alone_loses(
    many: torch.Tensor, other: torch.Tensor, monkeypatch: pytest.MonkeyPatch, llama: PreTrainedModel
) -> None:
    """The check windows say that every map pays; the other text says so of one set only, which is then chosen."""
    plain = best_removal(llama, many, REMOVE, search=40, protect=[0])
    order = sorted(plain.tried, key=lambda tried: tried.windows.mean())
    losses = search_module.losses

    def judged(helped: int | None) -> BestRemoval:
        def fake(reading: Any, removed: Any, mends: Any = ()) -> np.ndarray:
            found = losses(reading, removed)
            pays = reading.batch.ids.shape == many[CHECKED].shape or (
                helped is not None and tuple(removed) == order[helped].layers
            )
            return found if mends == () else found - 0.5 if pays else found + 0.001

        monkeypatch.setattr(search_module, "losses", fake)
        return best_removal(llama, many, REMOVE, search=40, mend=True, judge=other)

    alone = judged(None)
    assert not any(mended(final, np.array(t.windows)) for final in alone.finals for t in alone.tried)
    assert "better left unmended" in alone.headline()
    helped = judged(1)
    assert helped.remove == order[1].layers
    assert "; mended" in helped.headline()


def test_sets_that_cannot_be_mended_are_compared_as_they_are(
    many: torch.Tensor, other: torch.Tensor, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(model: Any, layers: Any, reading: Any, of: int) -> Any:
        raise lp.LyapunovPruneError("no place")

    monkeypatch.setattr(search_module, "fit_mends", refused)
    found = best_removal(llama, many, REMOVE, search=40, mend=True, judge=other)
    assert np.isnan([final.mended for final in found.finals]).all()
    assert "better left unmended" in found.headline()


def test_no_text_to_judge_by_is_written_by_the_model(many: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama")
    monkeypatch.setattr(judge_module, "_TOKENS", 64)
    monkeypatch.setattr(judge_module, "_CONTEXT", 16)
    found = best_removal(model, many, REMOVE, search=40, mend=True)
    assert found.other_on is not None
    assert found.other_on.text.startswith("written by")
    require_mended(model, many, judge_module.second_text(read(wrap(model), many)).ids, found)
    assert found.other_on in found.plan(REMOVE).measured_on


def test_mended_sets_are_not_mended_again(
    many: torch.Tensor, other: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny("llama")
    how: dict[str, Any] = {"search": 40, "mend": True, "judge": other, "folder": tmp_path}
    whole = best_removal(model, many, REMOVE, **how)
    monkeypatch.setattr(search_module, "fit_mends", lambda *_, **__: pytest.fail("mended again"))
    found = best_removal(model, many, REMOVE, **how)
    assert str(found) == str(whole)
    loaded = BestRemoval.load(found.save(tmp_path / "best.json"))
    assert (str(loaded), loaded.finals[0].layers) == (str(found), found.finals[0].layers)
    found = best_removal(model, many, REMOVE, search=40, folder=tmp_path)
    assert str(found) == str(best_removal(model, many, REMOVE, search=40))


def test_killed_before_the_last_set_is_mended(
    many: torch.Tensor, other: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured before is taken up, and the rest is that of the model without maps."""
    model = make_tiny("llama")
    how: dict[str, Any] = {"search": 40, "mend": True, "judge": other}
    whole = best_removal(model, many, REMOVE, **how)
    fitted: list[tuple[int, ...]] = []

    def dies(model: Any, layers: Any, reading: Any, of: int) -> Any:
        if len(fitted) == 1:
            raise KeyboardInterrupt
        fitted.append(layers)
        return fit_mends(model, layers, reading, of=of)

    with monkeypatch.context() as patch:
        patch.setattr(search_module, "fit_mends", dies)
        with pytest.raises(KeyboardInterrupt):
            best_removal(model, many, REMOVE, **how, folder=tmp_path)
    found = best_removal(model, many, REMOVE, **how, folder=tmp_path)
    assert found.to_json() == whole.to_json()


def test_too_few_tokens_to_mend_by(many: torch.Tensor, llama: PreTrainedModel) -> None:
    """Known before anything is measured; the number is of all windows, of which a half is scored."""
    with pytest.raises(lp.LyapunovPruneError, match=r"18 tokens.*86 tokens"):
        best_removal(llama, many[:8, :6], REMOVE, mend=True)


def test_a_choice_is_never_of_a_set_that_another_beats(many: torch.Tensor, llama: PreTrainedModel) -> None:
    """What is said of the others is by the same losses as the choice: none of them is better."""
    found = best_removal(llama, many, REMOVE, search=20)
    chosen = found.tried[found.chosen].windows
    assert all(compare(chosen, tried.windows).change >= 0 for tried in found.tried)
    close = sum(not compare(t.windows, chosen).pays for t in found.tried) - 1
    told = (
        f"No significant difference from {close} of the others"
        if close
        else "Significantly better than every other set"
    )
    assert told in found.headline()


# What is spent.


def test_forwards_are_those_that_were_run(many: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers: a tiny model's trials of prefix and scorer apart, every layer that computes is paid for."""
    model = make_tiny("llama")
    jobs: dict[str, Job] = {}
    run = Sweep.run

    def noted(self: Sweep, some: Any, description: str = "") -> Any:
        jobs.update((job.key, job) for job in some)
        return run(self, some, description)

    monkeypatch.setattr(Sweep, "run", noted)
    found = best_removal(model, many, REMOVE, search=7)
    head = model.get_output_embeddings().weight.numel()
    inside = sum(p.numel() for p in find_structure(model).layers.parameters())
    share, context = inside / (inside + head), many.shape[1]
    swept = 1.0
    spent = 1 + share / PART
    for job in jobs.values():
        after = LAYERS - job.first - len(job.remove)
        swept += after / LAYERS
        spent += (share * after / LAYERS + (1 - share)) * (job.tokens or context) / context
    cost, sources = candidates.SearchCost(share, LAYERS, 1.0), candidates.SOURCES.items()
    measured = [source.cost(cost, REMOVE) for name, source in sources if name not in found.left_out]
    assert (found.forwards - spent) * PART == pytest.approx(sum(measured))
    assert "grown" not in found.left_out
    assert {len(job.remove) for job in jobs.values() if job.tokens} == {0, REMOVE}
    calls = computed(model)
    with Sweep(model, many[CHECKED]) as sweep:
        sweep.run(list(jobs.values()))
    windows = len(many) // 2
    trials = 2 * LAYERS + (LAYERS - 1) * LAYERS / 2 + LAYERS + 4
    assert sum(calls.values()) / windows / LAYERS == pytest.approx(swept, abs=3 * trials / windows / LAYERS)


def test_only_the_best_on_the_beginnings_are_checked(many: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their losses on the beginnings are those of models without the layers, and no other set's is lower."""
    model = make_tiny("llama")
    looked: dict[tuple[int, ...], np.ndarray] = {}
    run = Sweep.run

    def noted(self: Sweep, some: Any, description: str = "") -> Any:
        found = run(self, some, description)
        looked.update((job.remove, found[job.key].windows) for job in some if job.tokens and job.remove)
        return found

    monkeypatch.setattr(Sweep, "run", noted)
    found = best_removal(model, many, REMOVE, search=7)
    assert len(found.tried) < len(looked)
    order = sorted(looked, key=lambda layers: looked[layers].mean())
    assert [tried.layers for tried in found.tried] == order[: len(found.tried)]
    for layers in order[:3]:
        small = lp.remove_layers(model, layers)
        beginnings = many[CHECKED][:, : many.shape[1] // PART]
        np.testing.assert_allclose(looked[layers], lp.perplexity(small, beginnings).windows, rtol=1e-5)


@pytest.mark.parametrize("search", [4, 7, 11.5, 30])
def test_no_more_is_spent_than_was_allowed(search: float, many: torch.Tensor, llama: PreTrainedModel) -> None:
    found = best_removal(llama, many, REMOVE, search=search)
    assert found.forwards <= search
    assert all(a.forwards < b.forwards for a, b in zip(found.tried, found.tried[1:], strict=False))
    assert ("kl" in found.left_out) == (search < 10)


def test_searches_of_one_reading_measure_once_and_find_what_each_finds_alone(
    many: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny("llama")
    alone = [best_removal(model, many, count, search=40) for count in (1, 3, 2)]
    calls: dict[str, int] = {}

    def counted(where: Any, name: str) -> None:
        function = getattr(where, name)

        def count(*given: Any, **how: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return function(*given, **how)

        monkeypatch.setattr(where, name, count)

    counted(module, "angular_distance")
    for name in ("profile_layers", "skip_divergence", "_added_turns"):
        counted(candidates, name)
    reading = read(wrap(model), many)
    together = [best_removal(model, reading, count, search=40) for count in (1, 3, 2)]
    assert [found.to_json() for found in together] == [found.to_json() for found in alone]
    assert calls == {"angular_distance": 1, "profile_layers": 1, "skip_divergence": 1, "_added_turns": 3}
    assert not any("kl" in found.left_out for found in together)


def test_finished_checks_are_not_repeated(many: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama")
    whole = best_removal(model, many, REMOVE, search=30)

    class Killed(Exception):
        pass

    measure = module.Sweep._measure
    seen: list[str] = []

    def die(self: Any, job: Any) -> Any:
        if len(seen) == 4:
            raise Killed
        seen.append(job.key)
        return measure(self, job)

    monkeypatch.setattr(module.Sweep, "_measure", die)
    with pytest.raises(Killed):
        best_removal(model, many, REMOVE, search=30, folder=tmp_path)
    again: list[str] = []
    monkeypatch.setattr(module.Sweep, "_measure", lambda self, job: again.append(job.key) or measure(self, job))
    monkeypatch.setattr(module, "angular_distance", pytest.fail)
    found = best_removal(model, many, REMOVE, search=30, folder=tmp_path)
    assert not {*seen} & {*again}
    assert [t.layers for t in found.tried] == [t.layers for t in whole.tried]
    assert str(found) == str(whole)
    loaded = BestRemoval.load(found.save(tmp_path / "best.json"))
    assert (str(loaded), loaded.plan(REMOVE).remove) == (str(found), found.remove)
    monkeypatch.undo()
    found = best_removal(model, many, REMOVE + 1, folder=tmp_path)
    assert str(found) == str(best_removal(model, many, REMOVE + 1))


# The plan, and how far it holds.


def test_a_plan_holds_the_least_loss_of_each_layer(many: torch.Tensor, llama: PreTrainedModel) -> None:
    found = best_removal(llama, many, REMOVE, search=20)
    plan = found.plan(REMOVE)
    assert (plan.remove, plan.criterion) == (found.remove, "best")
    assert [on.text_hash for on in plan.measured_on] == [found.measured_on.text_hash, found.checked_on.text_hash]
    for layer in range(LAYERS):
        losses = [t.windows.mean() for t in found.tried if layer in t.layers]
        np.testing.assert_equal(plan.scores[layer], min(losses, default=np.nan))
    with pytest.raises(lp.LyapunovPruneError, match="2 layers, not 3"):
        found.plan(3)


def test_a_clear_choice_is_told_apart() -> None:
    model = with_idle(1, 4)
    found = best_removal(model, own_words(model, 80), REMOVE, search=20)
    assert found.remove == (1, 4)
    assert "Significantly better than every other set" in found.headline()


def test_protected_layers_are_in_no_set() -> None:
    model = with_idle(1, 4)
    found = best_removal(model, own_words(model), REMOVE, search=30, protect=[1, -1])
    assert found.protected == (1, LAYERS - 1)
    assert not {1, LAYERS - 1} & {layer for tried in found.tried for layer in tried.layers}
    assert 4 in found.remove


BAD: list[tuple[dict[str, Any], str]] = [
    ({"search": 1.5}, r"1.5 forwards"),
    ({"protect": [0, 1, 2, 3, -1]}, "1 layers are left to remove beside the protected, and 2 should go"),
    ({"protect": [LAYERS]}, "layer 6 to protect"),
    ({"protect": [-LAYERS - 1]}, "layer -7 to protect"),
    ({"remove": LAYERS}, "cannot remove 6 of 6 layers"),
    ({"windows": 7}, "too few windows"),
    ({"windows": 7, "mend": True}, "too few windows"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD)
def test_bad_input(wrong: dict[str, Any], message: str, many: torch.Tensor, llama: PreTrainedModel) -> None:
    given = {"remove": REMOVE, "windows": len(many), **wrong}
    with pytest.raises(lp.LyapunovPruneError, match=message):
        best_removal(llama, many[: given.pop("windows")], given.pop("remove"), **given)


def test_no_set_with_a_finite_loss(many: torch.Tensor, monkeypatch: pytest.MonkeyPatch, llama: PreTrainedModel) -> None:
    measure = module.Sweep._measure

    def broken(self: Any, job: Any) -> Any:
        outcome = measure(self, job)
        return outcome if job.key == "dense" else type(outcome)(outcome.windows * np.nan, outcome.drift)

    monkeypatch.setattr(module.Sweep, "_measure", broken)
    with pytest.raises(lp.LyapunovPruneError, match="finite loss"):
        best_removal(llama, many, REMOVE)


def test_chosen_is_one_of_the_tried(many: torch.Tensor, llama: PreTrainedModel, tmp_path: Path) -> None:
    path = best_removal(llama, many, REMOVE, search=6).save(tmp_path / "best.json")
    path.write_text(path.read_text().replace('"chosen": ', '"chosen": 99'))
    with pytest.raises(lp.LyapunovPruneError, match="chose set 99"):
        BestRemoval.load(path)
