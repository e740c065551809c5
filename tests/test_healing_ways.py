"""6_recovery/healing_ways: its ways train what they say, and the gradient of the states' loss is autograd's."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from helpers import make_tiny

import lyapunov_prune as lp
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.healing.distillation import Distillation, distillation_loss

run = importlib.import_module("experiments.6_recovery.healing_ways.run")
REMOVED = (2, 3)


@pytest.fixture
def learnt() -> lp.TokenBatch:
    return TokenBatch(torch.arange(3, 99).view(6, 16) % 60, text="ids", split="all", bos=None)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_way_takes_its_steps_at_its_rate(
    rank: int | None, learnt: lp.TokenBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "TOKENS", 64)
    taken: list[tuple[int, float]] = []
    take_step = Distillation.take_step

    def note(self: Distillation, ids: torch.Tensor, rate: float) -> None:
        taken.append((len(ids), rate))
        take_step(self, ids, rate)

    monkeypatch.setattr(Distillation, "take_step", note)
    dense = make_tiny("llama")
    cut = lp.remove_layers(dense, REMOVED)
    ways = (
        (run.Way("usual", window=16, rank=rank), [(1, 1e-4 * share) for share in (1, 0.8536, 0.5, 0.1464)]),
        (run.Way("steady", window=16, rank=rank, falls=False), [(1, 1e-4)] * 4),
        (run.Way("two", window=16, rank=rank, per_step=2), [(2, 1e-4), (2, 0.5e-4)]),
    )
    for way, wanted in ways:
        taken.clear()
        healed = run.heal(cut, dense, REMOVED, learnt, way)
        assert [n for n, _ in taken] == [n for n, _ in wanted]
        assert [rate for _, rate in taken] == pytest.approx([rate for _, rate in wanted], rel=1e-3)
        moved = [not torch.equal(W, V) for W, V in zip(healed.parameters(), cut.parameters(), strict=True)]
        assert any(moved)


def test_the_gradient_of_the_states_is_that_of_their_loss(learnt: lp.TokenBatch) -> None:
    dense = make_tiny("llama").double()
    cut, weight, ids = lp.remove_layers(dense, REMOVED), 0.7, learnt.ids[:1]
    twin = copy.deepcopy(cut)

    seen: dict[str, list[torch.Tensor]] = {"dense": [], "cut": []}  # behind the gap: 4 and 5 of six, 2 and 3 of four
    for name, model, layers in (("dense", dense, (4, 5)), ("cut", twin, (2, 3))):
        for i in layers:
            model.model.layers[i].register_forward_hook(lambda m, args, output, name=name: seen[name].append(output))
    with torch.no_grad():
        target = dense(ids)
    output = twin(ids)
    states = list(zip(seen["cut"], seen["dense"], strict=True))
    loss = sum(((h - t).square().sum(-1) / t.square().sum(-1)).mean() for h, t in states) / len(states)
    log_p, log_q = target.logits.log_softmax(-1), output.logits.log_softmax(-1)
    (weight * loss + (log_p.exp() * (log_p - log_q)).sum(-1).mean()).backward()

    with run.states_taught(cut, dense, REMOVED, weight):
        with torch.no_grad():
            logits = uncached_logits(dense, ids).flatten(0, -2)
        own = uncached_logits(cut, ids).flatten(0, -2)
        own.backward(distillation_loss(own, logits)[1])
    for (name, W), (_, V) in zip(cut.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(W.grad, V.grad, msg=name)
