"""One size in bytes: block types for all layers, or layers gone and wider types for those that stay (no paper).

    python experiments/9_bytes/layers_and_bits/run.py --text FILE [--text FILE] [--model MODEL] [--size 1.1]...

MODEL is one off its grid, as `smollm2-135m-dithered-0`, and is the reference. Layers go in the order of the greedy
oracle; the gaps are mended and the model is healed from there, all on the built-in text, of which the half that none of
them read says which of cut, mended and healed is taken. Types are then chosen by cost within the bytes. A size is a
multiple of the bytes of the whole model in its narrowest types, below which nothing but a removal is left. Writes
MODEL-TEXT.json after every row, one a text: an interrupted run goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.block_types import Judge, divergence, fill
from experiments.common import BUILT_IN, DITHERED, Model, committed, read_text, run, show
from experiments.statements import bullets, counted, quotient, runs, short, table
from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.cost import costs
from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.budget.spend import chosen_types, least_of
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
COUNTS, SIZES = (0, 1, 2, 4), (0.9, 1.0, 1.1, 1.25)
CONTEXT = 256
CUT, MENDED, HEALED = "cut", "mended", "healed"


@dataclass(frozen=True)
class Row:
    """A model without the layers `removed`, taken as it was `made`: KL(dense ‖ it) of every window, nats a token.

    `size` is the multiple of the least bytes, None for a model that was not rounded.
    """

    removed: tuple[int, ...]
    made: str
    size: float | None
    bytes: int
    bits: float  # a weight of the matrices that are left
    kl: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.kl))


@dataclass(frozen=True)
class LayersAndBits(Result):
    """Rows on one text, by `commit`; `least` is the bytes of the whole model in its narrowest types."""

    rows: tuple[Row, ...]
    least: int
    steps: int
    commit: str
    calibrated_on: MeasuredOn
    chosen_on: MeasuredOn
    measured_on: MeasuredOn

    @property
    def named(self) -> tuple[str, str]:
        """The model and the text, as tables name them."""
        return self.measured_on.model.name.split(DITHERED)[0], Path(self.measured_on.text).stem

    def of(self, count: int, size: float | None) -> Row | None:
        return next((row for row in self.rows if (len(row.removed), row.size) == (count, size)), None)


def main(
    text: Annotated[list[str], typer.Option(help="to report on; of several, each alone")],
    model: Model = Model(f"{BUILT_IN}-dithered-0"),
    size: Annotated[list[float] | None, typer.Option(help="multiples of the least bytes; four if not given")] = None,
    remove: Annotated[list[int] | None, typer.Option(help="numbers of layers; 0, 1, 2 and 4 if not given")] = None,
    windows: Annotated[int, typer.Option(help="of 256 tokens, for costs, maps and healing")] = 24,
    steps: Annotated[int, typer.Option(help="of healing")] = 24,
    tokens: Annotated[int, typer.Option(help="of each text")] = 4096,
) -> None:
    commit, dense = committed(), model.load()
    learnt = read_text(dense, "builtin", windows * CONTEXT, CONTEXT)
    chooses = read(dense, read_text(dense, "builtin", tokens // 2, CONTEXT, "evaluation"))
    least = least_of(BLOCKS, matrices_of(dense.model))
    on = learnt.measured_on(dense), chooses.measured_on()
    judges = [
        Judge(judge, LayersAndBits((), least, steps, commit, *on, judge.measured_on()), HERE / name)
        for judge in (read(dense, read_text(dense, each, tokens, CONTEXT, "all")) for each in text)
        for name in [f"{on[0].model.name}-{Path(judge.batch.text).stem}.json"]
    ]
    counts = remove or COUNTS
    few = learnt.take(range(4))
    order = lp.ranking.greedy_removal(dense.model, few, max(counts), folder=model.jobs / "layers-and-bits").order
    for count in counts:
        wanted = [s for s in (None, *(size or SIZES)) if any(judge.found.of(count, s) is None for judge in judges)]
        if wanted:
            made, small = best(dense.model, order[:count], learnt, chooses, steps)
            for row, rounded in rounds(wrap(small, dense.tokenizer), learnt, least, wanted):
                for judge in judges:
                    if judge.found.of(count, row.size) is None:
                        judge.add(replace(row, removed=tuple(sorted(order[:count])), made=made), rounded)
    show(written())


def best(
    dense: PreTrainedModel, removed: Sequence[int], learnt: lp.TokenBatch, chooses: Reading, steps: int
) -> tuple[str, PreTrainedModel]:
    """The model without the layers: of cut, mended and healed the one of the least KL on the text that chooses."""
    if not removed:
        return CUT, dense
    made = {CUT: lp.remove_layers(dense, removed)}
    with suppress(LyapunovPruneError):  # no layer stands before the gap, or the fit is refused
        made[MENDED] = lp.mend(dense, removed, learnt)
    made[HEALED] = lp.heal(made.get(MENDED, made[CUT]), dense, learnt, steps=steps).model
    kl = {name: float(divergence(chooses, model).mean()) for name, model in made.items()}
    print("without", *removed, kl, flush=True)
    name = min(kl, key=lambda name: kl[name])
    return name, made[name]


@torch.no_grad()
def rounds(
    small: Decoder, learnt: lp.TokenBatch, least: int, sizes: Sequence[float | None]
) -> Iterator[tuple[Row, PreTrainedModel]]:
    """The model as it is and in the block types of least cost for each size that they can take, without its KL."""
    weights = sum(p.numel() for p in matrices_of(small.model).values())
    if None in sizes:
        yield Row((), "", None, 2 * weights, 16.0, ()), small.model
    rooms = {size: int(size * least) for size in sizes if size}
    if not rooms:
        return
    with torch.enable_grad():
        found = list(costs(read(small, learnt)))
    for size, room in rooms.items():
        if sum(int(t.bytes.min()) for t in found) <= room:
            pick = chosen_types(found, room)
            taken = int(sum(t.bytes[k] for t, k in zip(found, pick, strict=True)))
            rounded = copy.deepcopy(small.model)
            fill(rounded, small.model, found, pick)
            yield Row((), "", size, taken, 8 * taken / weights, ()), rounded


def written(folder: Path = HERE) -> dict[str, str]:
    found = [LayersAndBits.load(path) for path in sorted(folder.glob("*.json"))]
    return {"setting": bullets(*map(_setting, found)), "table": _table(found), "pays": _pays(found)}


def _setting(r: LayersAndBits) -> str:
    return (
        f"{r.least / 1e6:.1f} MB at least; commit {r.commit}; costs, maps and {r.steps} steps of healing on "
        f"{r.calibrated_on.line()}; cut, mended or healed by {r.chosen_on.line()}; KL on {r.measured_on.line()}"
    )


def _table(found: Sequence[LayersAndBits]) -> str:
    head = ("model", "text", "layers gone", "taken as", "not rounded", *(f"× {s:g} of the least" for s in SIZES))
    rows = []
    for r in found:
        for count in sorted({len(row.removed) for row in r.rows}):
            first = next(row for row in r.rows if len(row.removed) == count)
            at = [r.of(count, size) for size in (None, *SIZES)]
            cells = [f"{row.mean:.4f} ({row.bits:.2f} bits)" if row else None for row in at]
            rows.append((*r.named, runs(first.removed), first.made if count else "—", *cells))
    return table(head, rows)


def _pays(found: Sequence[LayersAndBits]) -> str:
    """The KL of the best removal over that of none at each size, by model and text."""
    told = []
    for r in found:
        for size in SIZES:
            alone = r.of(0, size)
            others = [row for row in r.rows if row.removed and row.size == size]
            if alone and others:
                best = min(others, key=lambda row: row.mean)
                share = quotient(np.array(best.kl), np.array(alone.kl))[1]
                told.append((*r.named, f"× {short(size)}", counted(len(best.removed), "layer"), share))
    return table(("model", "text", "size", "best removal", "KL / none gone"), told)


if __name__ == "__main__":
    run(main)
