"""Layers in parts: two processes that hold half of each end with what one does that holds all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from healing.test_heal import pair, short_trials, text_of
from helpers import launched_twice, make_tiny, moe
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.healing.heal import heal
from lyapunov_prune.healing.sharded import gathered, in_parts_like, require_shardable

LAYERS = 4  # of the dense model; every layer is sent at every step
SETTINGS: dict[str, Any] = {"steps": 20, "per_step": 4}  # three trials, then rounds
SCRIPT = """
import sys
sys.path[:0] = {tests!r}
import os, torch
from pathlib import Path
from healing.test_heal import interrupted_at, pair, short_trials, text_of, weights
from healing.test_sharded import LAYERS, SETTINGS
from lyapunov_prune.healing import training
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.heal import heal
import pytest
folder, rank = Path({folder!r}), os.environ["RANK"]
models, held = pair({family!r}, num_hidden_layers=LAYERS), []
short_trials(pytest.MonkeyPatch())
ids = text_of(models[1])
before = [weights(model) for model in models]
take_step = Distillation.take_step
def noted(self, windows, rate):
    held[:] = [(p.to_local().numel(), p.numel()) for p in self.parameters.values()]
    held.append(sum(p.to_local().numel() for p in self.teacher.parameters() if hasattr(p, "to_local")))
    take_step(self, windows, rate)
Distillation.take_step = noted
with pytest.MonkeyPatch.context() as patch:
    interrupted_at(9, patch)
    try:
        heal(*models, ids, folder=folder / "state", shard=True, **SETTINGS)
        raise SystemExit(1)
    except KeyboardInterrupt:
        pass
torch.distributed.barrier()
sent = []
for module in (torch.distributed, torch.distributed.distributed_c10d):
    def counted(tensor, *args, broadcast=module.broadcast, **kwargs):
        sent.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)
    module.broadcast = counted
done = heal(*models, ids, folder=folder / "state", shard=True, **SETTINGS)
training.free_memory = lambda device: 0
again = heal(*models, ids, shard=True, **SETTINGS)
alike = all(torch.equal(p, weights(again.model)[name]) for name, p in weights(done.model).items())
untouched = all(torch.equal(p, weights(m)[n]) for m, w in zip(models, before) for n, p in w.items())
refused = ""
try:
    heal(*models, ids, steps=1, per_step=3, shard=True)
except Exception as error:
    refused = str(error)
found = (done.report.losses, done.report.trained, held, alike, untouched, refused, max(sent))
torch.save((done.model.state_dict(), *found), folder / f"{{rank}}.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_two_processes_with_half_of_each_layer_end_as_one_with_all(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_trials(monkeypatch)
    script = tmp_path / "script.py"
    tests = [str(p) for p in Path(__file__).parents[1:3]]
    script.write_text(SCRIPT.format(tests=tests, folder=str(tmp_path), family=family))
    done = launched_twice(script)
    assert done.returncode == 0, done.stderr
    student, teacher = pair(family, num_hidden_layers=LAYERS)
    alone = heal(student, teacher, text_of(teacher), **SETTINGS)
    assert alone.report.kept >= 0
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in "01"]
    for model, losses, trained, held, alike, untouched, refused, sent in found:
        np.testing.assert_allclose(losses, alone.report.losses, rtol=1e-4)
        for name, p in alone.model.state_dict().items():
            torch.testing.assert_close(model[name], p, rtol=0, atol=2e-4)
        assert trained == alone.report.trained
        *students, teachers = held
        assert students
        assert all(abs(2 * mine - whole) <= whole / 8 for mine, whole in students)
        assert teachers > 0
        assert alike
        assert sent < 2 * trained  # bytes, of 16 a parameter in the state: no process is sent more of it at once
        assert untouched
        assert "3 windows per step" in refused
    assert all(torch.equal(p, found[1][0][name]) for name, p in found[0][0].items())


def test_one_process_has_nobody_to_share_with(ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="accelerate launch"):
        heal(*pair(), ids, steps=1, shard=True)
    with pytest.raises(LyapunovPruneError, match=r"rank.*shard"):
        heal(*pair(), ids, steps=1, rank=2, shard=True)


def with_experts() -> PreTrainedModel:
    model: Any = make_tiny("llama")
    model.model.layers[1].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    return model


def with_a_shared_weight() -> PreTrainedModel:
    model: Any = make_tiny("llama")
    first, second, *_ = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (with_experts, "has experts"),
        (with_a_shared_weight, "share weights"),
        (
            lambda: make_tiny("llama").to("meta"),
            "on meta",
        ),
    ],
)
def test_what_would_wait_for_ever_or_come_apart_is_refused(make: Any, says: str) -> None:
    with pytest.raises(LyapunovPruneError, match=says):
        require_shardable(make(), "the dense model")


@pytest.mark.parametrize("make", [lambda: make_tiny("llama"), lambda: moe("mixtral")])
def test_experts_in_one_parameter_are_taken(make: Any) -> None:
    require_shardable(make(), "the dense model")


def test_whole_tensors_stay_as_they_are() -> None:
    whole = torch.arange(6.0)
    assert gathered(whole) is whole
    assert torch.equal(in_parts_like(whole, torch.zeros(6)), whole)
