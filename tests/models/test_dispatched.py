"""Models that accelerate lays over several GPUs, and refusals in one line of those that it offloads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from helpers import LAYERS, make_tiny

import lyapunov_prune as lp
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.healing.heal import heal
from lyapunov_prune.models import dispatched
from lyapunov_prune.models.dispatched import over_gpus

PLACES: dict[str, int | str] = dict.fromkeys(
    ["model.embed_tokens", *(f"model.layers.{i}" for i in range(LAYERS)), "model.norm", "model.rotary_emb", "lm_head"],
    "cpu",
)


def with_gpus(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(dispatched, "free_memory", lambda device: free[int(device.removeprefix("cuda:"))])


@pytest.mark.parametrize("gpus", [1, 2])
def test_layers_go_over_all_gpus_and_stay_whole(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama").to("meta")
    with_gpus(monkeypatch, [10**9] * gpus)
    places = over_gpus(model)
    assert set(places.values()) == {*range(gpus)}
    for name, _ in model.named_parameters():
        assert sum(not at or f"{name}.".startswith(f"{at}.") for at in places) == 1
    assert not any(re.search(r"layers\.\d+\.", at) for at in places)


@pytest.mark.parametrize("free", [[], [10_000, 10_000]], ids=["no GPU", "small GPUs"])
def test_gpus_that_do_not_hold_the_model(free: list[int], checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, free)
    with pytest.raises(LyapunovPruneError, match="device disk") as error:
        lp.load(checkpoint, device="spread")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights_are_refused(place: str, ids: torch.Tensor, tmp_path: Path) -> None:
    model: Any = make_tiny("llama")
    if place == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    with pytest.raises(LyapunovPruneError, match="hold no numbers"):
        lp.rank(model, ids, criterion="bi")


def test_best_of_a_dispatched_model(ids: torch.Tensor) -> None:
    found = [
        lp.rank(each, ids.reshape(8, 15), criterion="best", remove=2, search=8).to_frame().to_dict()
        for each in (make_tiny("llama"), dispatch_model(make_tiny("llama"), PLACES, force_hooks=True))
    ]
    assert str(found[0]) == str(found[1])


def test_training_is_refused(ids: torch.Tensor) -> None:
    spread = dispatch_model(make_tiny("llama"), PLACES, force_hooks=True)
    with pytest.raises(LyapunovPruneError, match="several devices"):
        heal(spread, make_tiny("llama"), ids, steps=1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("heal", "tiny", "-o", "out"), "heal .*one device"),
        (("joint", "tiny", "--remove", "1", "-o", "out"), "joint .*one device"),
    ],
)
def test_options_that_do_not_go_together(run_bad: Callable[..., str], arguments: tuple[str, ...], told: str) -> None:
    assert re.search(told, run_bad(*arguments, "--device", "spread"))
