"""Speed: what is run, and what is reported. No test looks at how long anything took."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from families.zoo import make_zoo
from helpers import make_classifier, make_tiny
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, measure_speed, remove_layers
from lyapunov_prune.evaluation import Speed
from lyapunov_prune.evaluation.speed import Faster
from lyapunov_prune.report.evaluation import speed_figure


def set_clock(monkeypatch: pytest.MonkeyPatch, turns: list[list[float]]) -> None:
    """A clock by which the intervals of each turn take so many seconds, and 7 go by between two turns."""
    marks = iter(np.cumsum([seconds for turn in turns for seconds in (7.0, *turn)]).tolist())
    monkeypatch.setattr("lyapunov_prune.evaluation.speed.now", lambda model: next(marks))


def test_models_take_turns_and_decode_through_the_cache(llama: PreTrainedModel) -> None:
    pruned = remove_layers(llama, [1, 2])
    calls: list[tuple[str, int]] = []
    handles = [
        m.register_forward_pre_hook(lambda _, args, name=name: calls.append((name, args[0].shape[1])))
        for name, m in {"dense": llama, "pruned": pruned}.items()
    ]
    measure_speed({"dense": llama, "pruned": pruned}, prompt=8, steps=2, repeats=2)
    for handle in handles:
        handle.remove()
    turn = [("dense", 8), ("dense", 1), ("dense", 1), ("pruned", 8), ("pruned", 1), ("pruned", 1)]
    assert calls[:18] == turn * 3  # one round warms up
    assert len(calls) == 18 + 4  # in which operations are counted


def test_reports_tokens_per_second_against_the_first_model(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prefills of 1, 2 and 5 seconds and steps of 1, 2, 3, 4, 5 and 8, the other model twice as slow."""
    rounds = [[100.0, 100.0, 100.0], [1.0, 1.0, 2.0], [2.0, 3.0, 4.0], [5.0, 5.0, 8.0]]  # the first warms up
    set_clock(monkeypatch, [[slow * seconds for seconds in turn] for turn in rounds for slow in (1, 2)])
    speed = measure_speed({"dense": llama, "other": make_tiny("llama")}, prompt=8, steps=2, repeats=3)
    dense, other = speed.rows
    assert (dense.prefill, other.prefill) == (4, 2)
    assert dense.prefill_quartiles == pytest.approx((8 / 3.5, 8 / 1.5))
    assert (dense.decode, other.decode) == pytest.approx((1 / 3.5, 1 / 7))
    assert dense.decode_quartiles == pytest.approx((1 / 4.75, 1 / 2.25))
    assert dense.parameters == llama.num_parameters()
    assert speed.to_frame()["prefill ratio"].tolist() == [1, 0.5]
    assert speed.to_frame()["decode ratio"].tolist() == [1, 0.5]
    assert str(Speed.load(speed.save(tmp_path / "speed.json"))) == str(speed)


@pytest.mark.parametrize("times", [1.3, 1.5, 3.7])
def test_what_arithmetic_does_not_allow_is_not_told_as_a_speed(
    times: float, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of a busy machine was a result: × 3.73 for two of six layers."""
    rounds = [[100.0, 1.0], [1.0, 1.1], [1.1, 1.0], [0.9, 1.0], [1.0, 0.9]]
    turns = [[seconds / by for seconds in each] for each in rounds for by in (1, times)]
    set_clock(monkeypatch, turns)
    models = {"dense": llama, "pruned": remove_layers(llama, [1, 2])}
    speed = measure_speed(models, prompt=8, steps=1, repeats=4)
    row, (line,) = speed.rows[1], speed.answer()
    for ratio in (row.prefill_ratio, row.decode_ratio):
        assert ratio is not None
        assert ratio.most == 1.5  # of six layers and a head
        assert ratio.value == pytest.approx(times)
        assert ratio.low == pytest.approx(times)
        assert ratio.busy == (times > 2)
    assert ("machine busy" in line) == (f"{times:.2f}" not in line) == (times > 2)
    assert np.isnan(speed.to_frame()["prefill ratio"][1]) == (times > 2)


def test_the_interval_is_of_the_rounds_and_holds_what_is_paired() -> None:
    rng = np.random.default_rng(0)
    held = []
    for _ in range(200):
        machine = rng.lognormal(0, 0.5, 12)  # slow and fast rounds, which meet both models
        first, mine = (machine * seconds * rng.lognormal(0, 0.05, 12) for seconds in (1.2, 1.0))
        ratio = Faster.of(first / mine, 1.2)
        held.append(ratio.low <= 1.2 <= ratio.high)
        assert ratio.high - ratio.low < 0.5  # the rounds differ by a factor of 5
    assert np.mean(held) > 0.88


@pytest.mark.parametrize("family", ["openai-gpt", "mamba", "mamba2", "falcon_mamba", "recurrent_gemma"])
def test_whatever_a_decoder_calls_its_cache_is_handed_on(family: str) -> None:
    model = make_zoo(family)
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    measure_speed({family: model}, prompt=9, steps=2, repeats=1)
    none = family in ("openai-gpt", "recurrent_gemma")  # the whole text again at every step
    assert lengths == ([9, 10, 11] if none else [9, 1, 1]) * 2


def test_more_tokens_than_the_context_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match=r"128 and 1 .*128"):
        measure_speed({"dense": llama}, prompt=128, steps=1)


def test_classifiers_are_timed_by_images_of_one_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, [[100.0], [100.0], [1.0], [2.0], [3.0], [6.0]])  # the first round warms up
    models = {name: make_classifier(name) for name in ("vit", "deit")}
    calls: list[tuple[str, tuple[int, ...]]] = []
    for name, model in models.items():
        model.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: calls.append((name, tuple(kwargs["pixel_values"].shape))),
            with_kwargs=True,
        )
    speed = measure_speed(models, prompt=12, repeats=2)
    assert calls[:6] == [("vit", (12, 1, 8, 8)), ("deit", (12, 1, 8, 8))] * 3
    assert [row.prefill for row in speed.rows] == [6, 3]
    assert speed.rows[0].prefill_quartiles == pytest.approx((12 / 2.5, 12 / 1.5))
    assert speed.to_frame()["ratio"].tolist() == [1, 0.5]
    assert all(np.isnan(row.decode) for row in speed.rows)
    assert (speed.images, speed.steps) == (True, 0)
    assert list(speed.to_frame()) == ["model", "parameters", "images/s", "ratio"]
    assert str(Speed.load(speed.save(tmp_path / "speed.json"))) == str(speed)
    assert "12 images at once, 2 times" in speed.headline()
    drawn = speed_figure(speed)
    assert "6.0 images/s" in drawn
    assert "decoding" not in drawn


def test_files_from_before_images_are_of_text(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = measure_speed({"dense": llama}, prompt=4, steps=1, repeats=1).save(tmp_path / "speed.json")
    old = json.loads(path.read_text())
    del old["images"]
    path.write_text(json.dumps(old))
    assert not Speed.load(path).images


def test_text_and_images_are_not_timed_together(llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match="some of the models read text and some read images"):
        measure_speed({"a": llama, "b": make_classifier("vit")}, prompt=4)
