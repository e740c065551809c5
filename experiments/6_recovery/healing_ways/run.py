"""Ways to spend as many tokens of healing: rate, schedule, loss, windows, rank, and where it starts (§7, future work).

    python experiments/6_recovery/healing_ways/run.py [--model MODEL] --text A.txt --unseen B.txt

Four layers go by `angular`; their gaps are mended and the mended model is healed on the beginning of `--text` by TOKENS
tokens, in every way of WAYS, and scored on that of `--unseen`. Writes ways.json beside this file, of another model in a
folder by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Learnt, Model, Scored, Unseen, run_command
from experiments.statements import ratio, runs, table
from experiments.unseen import OnUnseenText, settings, two_texts
from lyapunov_prune.forward.hooks import hidden_of
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.rounds import schedule
from lyapunov_prune.healing.trained import drawn_order, trained
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import find_layers
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
CRITERION, REMOVE = "angular", 4
TOKENS = 10_240
FULL_RATE, LOW_RANK_RATE = 1e-4, 2e-3  # absolute, the defaults when this was measured
Make = Callable[[], PreTrainedModel]


@dataclass(frozen=True)
class Way:
    """How a model is healed: at one absolute rate, without judging. Every way differs from the first in one thing.

    `states` weighs `1/L Σ_l mean_t ‖h_l,t − h'_l,t‖² / ‖h_l,t‖²`, over the layers behind the gap, beside the loss of
    the prediction.
    """

    name: str
    rate: float = FULL_RATE
    falls: bool = True
    rank: int | None = None
    window: int = 256
    per_step: int = 1
    seed: int = 0
    states: float = 0.0
    mended: bool = True

    @property
    def steps(self) -> int:
        return TOKENS // (self.window * self.per_step)


WAYS = (
    Way("the usual way"),
    Way("another order of windows", seed=1),
    Way("rate 3e-5", rate=3e-5),
    Way("rate 3e-4", rate=3e-4),
    Way("rate 1e-3", rate=1e-3),
    Way("a rate that does not fall", falls=False),
    Way("rank 8", rank=8, rate=LOW_RANK_RATE),
    Way("rank 32", rank=32, rate=LOW_RANK_RATE),
    Way("windows of 128 tokens", window=128),
    Way("windows of 512 tokens", window=512),
    Way("two windows a step", per_step=2),
    Way("states beside the prediction", states=1.0),
    Way("from the cut model", mended=False),
)


@dataclass(frozen=True)
class Healed:
    """Losses of the windows of the unseen text, of the model healed in that way."""

    name: str
    steps: int
    windows: np.ndarray


@dataclass(frozen=True)
class HealingWays(OnUnseenText):
    removed: tuple[int, ...]
    cut: np.ndarray
    mended: np.ndarray
    healed: tuple[Healed, ...]

    DONE: ClassVar[str] = "chosen, mended and healed on"

    def headline(self) -> str:
        removed = f"Without layers {runs(self.removed)} by `{CRITERION}`, healed by {TOKENS:,} tokens"
        return f"{removed}: {super().headline()}"


def main(
    text: Learnt,
    unseen: Unseen,
    model: Model = Model(),
    tokens: int = 16384,
    context: int = 512,
    scored: Scored = 4096,
) -> None:
    loaded = model.load()
    dense = loaded.model
    learnt, judged, origins = two_texts(loaded, (text, tokens), (unseen, scored), context, context)
    removed = lp.rank(dense, learnt, criterion=CRITERION, remove=REMOVE).plan(REMOVE).remove
    starts: dict[bool, Make] = {
        True: cache(lambda: lp.mend(dense, removed, learnt)),
        False: lambda: lp.remove_layers(dense, removed),
    }
    makers: dict[str, Make] = {"dense": lambda: dense, "cut": starts[False], "mended": starts[True]}
    makers |= {way.name: lambda way=way: heal(starts[way.mended](), dense, removed, learnt, way) for way in WAYS}
    with Store(model.jobs / "healing-ways", "healing ways", {"texts": encode(origins)}) as store:
        for name, make in makers.items():
            if name not in store:
                store.add(name, lp.perplexity(make(), judged, description=name).windows.tolist())
        losses = {name: np.array(store[name]) for name in makers}
    healed = tuple(Healed(way.name, way.steps, losses[way.name]) for way in WAYS)
    found = HealingWays(losses["dense"], *origins, removed, losses["cut"], losses["mended"], healed)
    found.save(model.folder(HERE) / "ways.json")


def heal(
    start: PreTrainedModel, dense: PreTrainedModel, removed: tuple[int, ...], learnt: lp.TokenBatch, way: Way
) -> PreTrainedModel:
    """Distillation by the way's steps; what comes last is kept."""
    ids = replace(learnt, ids=learnt.ids.reshape(-1, way.window)).ids
    order = drawn_order(len(ids), way.steps * way.per_step, way.seed)
    model = copy.deepcopy(start)
    with trained(model, way.rank, way.seed) as parameters, states_taught(model, dense, removed, way.states):
        run = Distillation(model, dense, parameters, 1.0)
        for step in range(way.steps):
            rate = way.rate * (schedule(step, way.steps) if way.falls else 1)
            run.take_step(ids[order[step * way.per_step : (step + 1) * way.per_step]], rate)
    return model


@contextmanager
def states_taught(
    model: PreTrainedModel, dense: PreTrainedModel, removed: tuple[int, ...], weight: float
) -> Iterator[None]:
    """Add the gradient of the states' loss where it arises: the dense model has read the same tokens just before."""
    kept = [layer for layer in range(len(find_layers(dense).layers)) if layer not in removed]
    pairs = [(i, layer) for i, layer in enumerate(kept) if layer > min(removed)] if weight else []
    seen: dict[int, torch.Tensor] = {}
    hooks: list[tuple[nn.Module, Any]] = []
    for i, layer in pairs:

        def remember(module: nn.Module, args: Any, kwargs: Any, output: Any, layer: int = layer) -> None:
            seen[layer] = hidden_of(output)

        def pull(module: nn.Module, args: Any, kwargs: Any, output: Any, layer: int = layer) -> None:
            hidden, target = hidden_of(output), seen[layer]
            size = target.square().sum(-1, keepdim=True) * target[..., 0].numel() * len(pairs)
            added = 2 * weight * (hidden.detach() - target) / size
            hidden.register_hook(lambda gradient: gradient + added)

        hooks += [(find_layers(dense).layers[layer], remember), (find_layers(model).layers[i], pull)]
    with hooked(after=hooks):
        yield


def written(folder: Path = HERE) -> dict[str, str]:
    found = HealingWays.load(folder / "ways.json")
    return {"setting": settings([found]), "ways": ways(found)}


def ways(found: HealingWays) -> str:
    usual = found.healed[0].windows
    rows: list[tuple[object, ...]] = [
        (name, "—", ratio(windows), ratio(windows - found.dense), ratio(windows - usual))
        for name, windows in (("cut", found.cut), ("mended", found.mended))
    ]
    for way in found.healed:
        beside = None if way.windows is usual else ratio(way.windows - usual)
        rows.append((way.name, way.steps, ratio(way.windows), ratio(way.windows - found.dense), beside))
    return table(("", "steps", "perplexity", "/ dense", "/ the usual way"), rows)


if __name__ == "__main__":
    run_command(main, HERE / "ways.json", written)
