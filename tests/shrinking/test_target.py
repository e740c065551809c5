"""How much goes: one target, and the number of layers that it asks for."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import LAYERS
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.speed import Speed, SpeedRow
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.shrinking import target as module
from lyapunov_prune.shrinking.target import Target, count_for


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"remove": 2, "speedup": 1.2},
        {"max_drop": "gsm8k.jsonl"},
        {"max_drop": ":0.02"},
        {"max_drop": "gsm8k.jsonl:much"},
        {"max_drop": "gsm8k.jsonl:2"},
        {"remove": 2, "what": "layers,width"},
        {"max_kl": 0.1, "what": "layers,experts"},
    ],
)
def test_what_is_no_target_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(LyapunovPruneError):
        Target.of(**asked)


def test_a_drop_names_its_task() -> None:
    assert Target.of(max_drop="a:b.jsonl:0.02") == Target("max_drop", 0.02, "a:b.jsonl")


def test_a_share_of_parameters_counts_no_layers() -> None:
    target = Target.of(remove=0.2, what="layers,width")
    assert not target.is_counted
    assert target.option() == ["--what", "layers,width", "--remove", "0.2"]


@pytest.mark.parametrize(("remove", "count"), [(2, 2), (0.25, 2), (0.5, 3), (LAYERS - 1, LAYERS - 1)])
def test_a_number_or_a_share_of_the_layers(remove: float, count: int, llama: PreTrainedModel) -> None:
    assert count_for(Target.of(remove=remove), llama) == count


@pytest.mark.parametrize("remove", [LAYERS, 0.99])
def test_one_layer_stays(remove: float, llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match=f"of {LAYERS} layers"):
        count_for(Target.of(remove=remove), llama)


@pytest.fixture
def linear_time(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A forward takes 4 + 2 a layer; returns the layers of the models that were timed."""
    timed: list[int] = []

    def measured(models: dict[str, PreTrainedModel], **_: Any) -> Speed:
        rows = []
        for name, model in models.items():
            layers = find_structure(model).num_layers
            timed.append(layers)
            rows.append(SpeedRow(name, 1, 1 / (4 + 2 * layers), (), 1.0, ()))
        return Speed(tuple(rows), 1, 1, 1, "cpu", "float32", 1, {})

    monkeypatch.setattr(module, "measure_speed", measured)
    return timed


@pytest.mark.parametrize(("speedup", "count"), [(1.1, 1), (1.2, 2), (16 / 12, 2), (1.5, 3), (2.6, 5)])
def test_a_speed_is_met_by_the_fewest_layers(
    speedup: float, count: int, llama: PreTrainedModel, linear_time: list[int]
) -> None:
    assert count_for(Target.of(speedup=speedup), llama) == count
    assert len(linear_time) <= 2 * 3 if count < LAYERS - 1 else True  # the most, and the neighbours of the guess


def test_a_speed_out_of_reach_says_how_near_it_comes(llama: PreTrainedModel, linear_time: list[int]) -> None:
    with pytest.raises(LyapunovPruneError, match=r"it is 2\.67 times"):
        count_for(Target.of(speedup=3.0), llama)
