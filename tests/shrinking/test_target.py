"""How much goes: one target, and the number of layers that it asks for."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import LAYERS
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.worth import GOOD
from lyapunov_prune.shrinking.target import Target, count_for


@pytest.mark.parametrize(
    "asked",
    [
        {"remove": 2, "max_kl": 1.2},
        {"max_drop": "gsm8k.jsonl"},
        {"max_drop": ":0.02"},
        {"max_drop": "gsm8k.jsonl:much"},
        {"max_drop": "gsm8k.jsonl:2"},
    ],
)
def test_what_is_no_target_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(LyapunovPruneError):
        Target.of(**asked)


def test_without_a_target_little_may_be_lost() -> None:
    assert Target.of() == Target("gentle", GOOD)
    assert not Target.of().is_counted


def test_a_drop_names_its_task() -> None:
    assert Target.of(max_drop="a:b.jsonl:0.02") == Target("max_drop", 0.02, "a:b.jsonl")


@pytest.mark.parametrize(("remove", "count"), [(2, 2), (0.25, 2), (0.5, 3), (LAYERS - 1, LAYERS - 1)])
def test_a_number_or_a_share_of_the_layers(remove: float, count: int, llama: PreTrainedModel) -> None:
    assert count_for(Target.of(remove=remove), llama) == count


@pytest.mark.parametrize("remove", [LAYERS, 0.99])
def test_one_layer_stays(remove: float, llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match=f"of {LAYERS} layers"):
        count_for(Target.of(remove=remove), llama)
