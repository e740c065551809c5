"""Does it pay to heal only what stands beside a gap, or only what comes after the first gap?

    python experiments/6_recovery/local/run.py --text A.txt --model MODEL [--removed 12 …]

The cut model is trained in several ways on the first half of --text, and scored on windows of the second half. `local`:
gap by gap, the layer before it (and the one after it) learns the dense state behind them from the states of the cut
model before them, without head or other layers; an error e costs eᵀ(F + 0.1 mean diag F) e / ‖y‖, where F is the Fisher
information of the dense state y, from one backward of the dense model with sampled labels. `distilled`: as `heal`, all
layers, or those from the layer before the first gap on, whose inputs are then those of the dense model. Writes
MODEL.json beside this file: the loss after so many seconds of the processor, of which scoring is none.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.nn.functional import cross_entropy

import lyapunov_prune as lp
from experiments.common import Learnt, Model, plain, read_text, run
from experiments.statements import table
from lyapunov_prune.forward.hooks import hidden_of
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.healing.distillation import CLIP, OPTIMIZERS, distillation_loss, update_sizes
from lyapunov_prune.healing.rounds import schedule
from lyapunov_prune.healing.trained import drawn_order, frozen
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.results.files import write_whole

HERE = Path(__file__).parent
RATE, LOCAL_STEPS, STEPS, SCORED_EVERY = 1e-3, 150, 100, 25
FISHER_WINDOWS, RIDGE = 8, 0.1
FIELDS = ("text", "split", "text_hash", "tokens", "context")  # what the result says of a text
Told = Callable[[str, int, float], None]


def main(
    text: Learnt,
    model: Model = Model(dtype="float32"),
    removed: Annotated[list[int], typer.Option(help="layers that go")] = [*range(12, 19), 25],  # noqa: B006
    windows: int = 64,
    context: int = 128,
) -> None:
    loaded = model.load()
    dense = loaded.model
    learnt = read(loaded, read_text(loaded, text, windows * context, context, "calibration"))
    scored = read_text(loaded, text, 12 * context, context, "evaluation")
    rows: list[dict[str, Any]] = []
    first = min(removed) - 1

    def cut() -> Reading:
        return read(lp.wrap(lp.remove_layers(dense, removed)), learnt.batch)

    def told(of: Reading, before: float = 0.0) -> Told:
        def add(way: str, steps: int, seconds: float) -> None:
            loss = lp.perplexity(of.model, scored).nll
            rows.append({"way": way, "steps": steps, "seconds": round(before + seconds, 1), "loss": round(loss, 4)})

        return add

    student = cut()
    told(student)("cut", 0, 0.0)
    began = time.process_time()
    mended = read(lp.wrap(lp.mend(dense, removed, learnt.batch)), learnt.batch)
    told(mended)("mended", 0, time.process_time() - began)
    distilled(student, learnt, 0, "distilled", told(student))
    student = cut()
    distilled(student, learnt, first, "distilled from the first gap on", told(student))
    student = cut()
    local(student, learnt, removed, 0, "local, the layer before a gap", told(student))
    student = cut()
    seconds = local(student, learnt, removed, 1, "local, the layers before and after a gap", told(student))
    distilled(student, learnt, first, "then distilled from the first gap on", told(student, seconds))
    about = {
        "model": plain(model.name),
        "removed": removed,
        "dense": round(lp.perplexity(dense, scored).nll, 4),
        "rows": rows,
    }
    batches = {"measured_on": scored, "learnt_on": learnt.batch}
    about |= {name: {field: getattr(batch, field) for field in FIELDS} for name, batch in batches.items()}
    write_whole(HERE / f"{plain(model.name)}.json", json.dumps(about, indent=1) + "\n")


@contextmanager
def stepping(student: Reading, layers: range, steps: int) -> Iterator[Callable[..., None]]:
    """Train `layers` of the student: a function that takes step k of so many on the gradients there are."""
    with frozen(student.model):
        for layer in layers:
            student.structure.layers[layer].requires_grad_(True)
        parameters = {name: p for name, p in student.structure.layers.named_parameters() if p.requires_grad}
        sizes = update_sizes(student.model, parameters)
        optimizer = OPTIMIZERS["adamw"]([{"params": [p], "lr": 0.0, "size": sizes[n]} for n, p in parameters.items()])

        def step(k: int, clip: float = math.inf) -> None:
            nn.utils.clip_grad_norm_(parameters.values(), clip)
            for group in optimizer.param_groups:
                group["lr"] = RATE * schedule(k, steps) * group["size"]
            optimizer.step()
            optimizer.zero_grad()

        with torch.enable_grad():
            yield step


def distilled(student: Reading, learnt: Reading, first: int, way: str, told: Told) -> None:
    """Distillation of the layers from `first` on; those before it run in the dense model alone."""
    seconds, states = 0.0, list[torch.Tensor]()
    note = lambda module, args, kwargs, output: states.append(hidden_of(output))  # noqa: E731
    after = [(learnt.structure.layers[first - 1], note)] if first else []
    with stepping(student, range(first, student.structure.num_layers), STEPS) as step:
        for k, window in enumerate(drawn_order(len(learnt.batch), STEPS, 0)):
            began, ids = time.process_time(), learnt.windows(1)[window]
            states.clear()
            with torch.no_grad(), hooked(after=after):
                target = learnt.model(ids, use_cache=False).logits[0]
            with student.prefix.entered(first, states[0]) if first else nullcontext():
                logits = student.model(ids, use_cache=False).logits[0]
            logits.backward(distillation_loss(logits.detach(), target)[1])
            step(k, CLIP)
            seconds += time.process_time() - began
            if (k + 1) % SCORED_EVERY == 0:
                told(way, k + 1, seconds)


def local(student: Reading, learnt: Reading, removed: list[int], after: int, way: str, told: Told) -> float:
    """The layer before each gap, and so many after it, learn the dense state behind them; returns the seconds."""
    began = time.process_time()
    kept = [layer for layer in range(learnt.structure.num_layers) if layer not in removed]
    gaps = [[layer for _, layer in g] for _, g in groupby(enumerate(removed), key=lambda pair: pair[1] - pair[0])]
    windows, at, begin = learnt.windows(1), 0, list[Any]([None] * len(learnt.batch))
    dense, dense_at = begin, 0
    for gap in gaps:
        first = kept.index(gap[0] - 1)
        end = first + 1 + after  # of the student; `behind` is the same boundary of the dense model
        behind = kept[end] if end < len(kept) else learnt.structure.num_layers
        with torch.no_grad():
            dense = [learnt.prefix.advance(i, dense_at, h, behind) for i, h in zip(windows, dense, strict=True)]
            begin = [student.prefix.advance(i, at, h, first) for i, h in zip(windows, begin, strict=True)]
        dense_at, at = behind, first
        factor = fisher_factor(learnt, windows, dense, behind)
        with stepping(student, range(first, end), LOCAL_STEPS) as step:
            for k, window in enumerate(drawn_order(len(windows), LOCAL_STEPS, 0)):
                state = student.prefix.advance(windows[window], first, begin[window], end)
                wanted = dense[window][0]
                weight = wanted.norm(dim=-1).reciprocal()
                error = ((state[0] - wanted) @ factor).square().sum(-1)
                ((error * weight).sum() / weight.sum()).backward()
                step(k)
    seconds = time.process_time() - began
    told(way, LOCAL_STEPS * len(gaps), seconds)
    return seconds


def fisher_factor(
    reading: Reading, windows: list[torch.Tensor], states: list[torch.Tensor], boundary: int
) -> torch.Tensor:
    """`C` of `C Cᵀ = F + RIDGE mean(diag F) I`, width × width: F is the Fisher information of the state at `boundary`.

    Its expectation over the labels is taken by one sample for each token.
    """
    draw, gradients = torch.Generator().manual_seed(0), list[torch.Tensor]()
    for ids, state in zip(windows[:FISHER_WINDOWS], states[:FISHER_WINDOWS], strict=True):
        leaf = state.clone().requires_grad_()
        with frozen(reading.model), torch.enable_grad(), reading.prefix.entered(boundary, leaf):
            logits = reading.model(ids, use_cache=False).logits[0]
            labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=draw)[:, 0]
            cross_entropy(logits, labels, reduction="sum").backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad[0].double())
    g = torch.cat(gradients)
    fisher = g.T @ g / len(g)
    ridge = RIDGE * fisher.diagonal().mean() * torch.eye(len(fisher)).to(fisher)
    return torch.linalg.cholesky(fisher + ridge).to(states[0])


def written() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(HERE.glob("*.json")):
        of = json.loads(path.read_text(encoding="utf-8"))
        cells = [
            [row["way"], row["steps"], row["seconds"], row["loss"], row["loss"] - of["dense"]] for row in of["rows"]
        ]
        found[of["model"]] = table(["way", "steps", "processor seconds", "loss", "above dense"], cells)
    return found


if __name__ == "__main__":
    run(main)
