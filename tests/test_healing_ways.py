"""experiments/44_healing_ways: its training is that of `heal`, and the gradient of the states' loss is autograd's."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from helpers import make_tiny

import lyapunov_prune as lp
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.healing.distillation import distillation_loss

run = importlib.import_module("experiments.44_healing_ways.run")
REMOVED = (2, 3)


@pytest.fixture
def learnt() -> lp.TokenBatch:
    return TokenBatch(torch.arange(3, 99).view(6, 16) % 60, text="ids", split="all", bos=None)


def test_the_usual_way_is_that_of_heal(learnt: lp.TokenBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TOKENS", 64)
    dense = make_tiny("llama")
    cut = lp.remove_layers(dense, REMOVED)
    for way in (
        run.Way("usual", window=16),
        run.Way("low rank", window=16, rank=2),
        run.Way("two", window=16, per_step=2),
    ):
        expected = lp.heal(
            cut, dense, learnt, steps=way.steps, per_step=way.per_step, rank=way.rank, learning_rate=way.rate
        )
        found = run.heal(cut, dense, REMOVED, learnt, way)
        for (name, W), (_, V) in zip(found.named_parameters(), expected.model.named_parameters(), strict=True):
            torch.testing.assert_close(W, V, msg=name)


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
