"""What stands for a feed-forward block that lost its activation: how much of it each reduction keeps, on unseen text.

    python experiments/5_joint/reductions/run.py [--model MODEL] [--text FILE]

Every block alone: by each reduction the share of the block's output that is kept on text that no fit has seen, and the
perplexity with one matrix in the block's place; the least-squares fit by its ridge and by the number of tokens. Writes
MODEL.json and MODEL.svg beside this file; what they say goes into README.md by `make tables`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

import lyapunov_prune as lp
from experiments.common import Model, draw, run_command, texts
from experiments.statements import bullets, interval, percent, short, table
from experiments.unseen import OnUnseenText
from lyapunov_prune.calibration.blocks import Passed, sum_blocks, watched_blocks
from lyapunov_prune.evaluation.perplexity import interval_of
from lyapunov_prune.export import Cuts, make_compact
from lyapunov_prune.forward.hooks import run_backbone
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.linalg import lift
from lyapunov_prune.merging.merge import merge_layers, product
from lyapunov_prune.merging.reduction import HiddenMap
from lyapunov_prune.merging.reductions.affine import RIDGE, least_squares
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.models.feedforward import FeedForward, find_feedforward
from lyapunov_prune.progress import track
from lyapunov_prune.report.drawing import COLOURS, depth_axis, log_axis, panels, svg

HERE = Path(__file__).parent
CONTEXT = 256
RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
TOKENS = (1024, 2048, 4096)  # that the least-squares fit takes


@dataclass(frozen=True)
class Kept:
    """One block merged by a reduction: `1 − Σ‖y − ŷ‖² / Σ‖y − ȳ‖²` on unseen text, and the losses of its windows."""

    layer: int
    reduction: str
    explained: float
    windows: np.ndarray


@dataclass(frozen=True)
class Ridge:
    """The least-squares fit of a block's output: the same share, by layer."""

    tokens: int
    ridge: float
    explained: np.ndarray


@dataclass(frozen=True)
class KeptByReductions(OnUnseenText):
    """Of every block alone."""

    kept: tuple[Kept, ...]
    ridges: tuple[Ridge, ...]

    DONE: ClassVar[str] = "fitted on"

    def cost(self, kept: Kept) -> float:
        return float(np.exp((kept.windows - self.dense).mean()))

    def by(self, reduction: str) -> list[Kept]:
        return [k for k in self.kept if k.reduction == reduction]

    @property
    def reductions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(k.reduction for k in self.kept))

    @property
    def name(self) -> str:
        return self.measured_on.model.name


def main(model: Model = Model(), text: str = "builtin", tokens: int = 2048) -> None:
    loaded = model.load()
    calibration, evaluation = texts(loaded, text, calibration=max(TOKENS), evaluation=tokens, context=CONTEXT)
    found = measure(read(loaded, calibration), read(loaded, evaluation))
    found.save(HERE / f"{found.name}.json")
    draw(HERE, {found.name: figure(found)})


@torch.no_grad()
def measure(calibration: Reading, evaluation: Reading) -> KeptByReductions:
    model, structure = calibration.model, calibration.structure
    blocks = [find_feedforward(structure, i) for i in range(structure.num_layers)]
    kind = "gated" if blocks[0].gated else "plain"
    kept = []
    for reduction in [name for name, entry in REDUCTIONS.items() if kind in entry.blocks]:
        merged = merge_layers(model, calibration, range(structure.num_layers), reduction)
        shares = explained(evaluation, blocks, [m.tau for m in merged])
        for m, share in zip(track(merged, reduction), shares, strict=True):
            small = make_compact(model, Cuts(merged={m.block.layer: (m.weight, m.bias)}))
            kept.append(Kept(m.block.layer, reduction, share, lp.perplexity(small, evaluation.batch).windows))
    return KeptByReductions(
        dense=lp.perplexity(model, evaluation).windows,
        kept=tuple(kept),
        ridges=tuple(ridges(calibration, evaluation, blocks)),
        measured_on=evaluation.measured_on(),
        calibrated_on=calibration.measured_on(),
    )


def ridges(calibration: Reading, evaluation: Reading, blocks: list[FeedForward]) -> Iterable[Ridge]:
    layers = calibration.structure.layers
    for tokens in TOKENS:
        forward = partial(run, calibration, calibration.windows(1)[: tokens // CONTEXT])
        sums = sum_blocks(layers, blocks, REDUCTIONS["affine"].needs, forward)
        for ridge in RIDGES:
            taus = [least_squares(s, ridge) for s in sums]
            yield Ridge(tokens, ridge, np.array(explained(evaluation, blocks, taus)))


def run(reading: Reading, windows: Iterable[torch.Tensor]) -> None:
    for ids in windows:
        run_backbone(reading.structure, ids)


def explained(reading: Reading, blocks: list[FeedForward], taus: list[HiddenMap]) -> list[float]:
    """The share of each block's output that is kept when `h` becomes `τ(x)`, over the tokens of `reading`."""
    layers = reading.structure.layers
    outs = {b.layer: b.parts(layers[b.layer]).out for b in blocks}
    wide = {b.layer: (lift(outs[b.layer][0]), product(outs[b.layer], tau)) for b, tau in zip(blocks, taus, strict=True)}
    errors = dict.fromkeys(outs, 0.0)
    outputs: dict[int, list[torch.Tensor]] = {layer: [] for layer in outs}

    def note(block: FeedForward, passed: Passed) -> None:
        W, (M, moved) = wide[block.layer]
        y = lift(passed.hidden) @ W.T
        bias = outs[block.layer][1]
        less = 0.0 if moved is None else moved - (0.0 if bias is None else lift(bias))
        errors[block.layer] += float((y - lift(passed.x) @ M.T - less).square().sum())
        outputs[block.layer].append(y)

    with watched_blocks(layers, blocks, note):
        run(reading, reading.windows(1))
    whole = {layer: torch.cat(rows) for layer, rows in outputs.items()}
    return [1 - errors[i] / float((y - y.mean(0)).square().sum()) for i, y in whole.items()]


def figure(found: KeptByReductions) -> str:
    drawn, (kept, cost) = panels(6.5, 5.0, 2)
    for name, colour in zip(found.reductions, COLOURS.values(), strict=False):
        rows = found.by(name)
        layers = [k.layer for k in rows]
        kept.plot(layers, [k.explained for k in rows], "o-", markersize=3, label=name, color=colour)
        bars = np.array([interval_of(k.windows - found.dense) for k in rows]).T
        ratios = np.array([found.cost(k) for k in rows])
        cost.errorbar(layers, ratios, abs(bars - ratios), fmt="o-", markersize=3, capsize=2, color=colour)
    kept.set_ylim(-1, 1)
    kept.set_ylabel("share of the output kept")
    kept.legend(fontsize=8)
    log_axis(cost, "y")
    cost.set_ylabel("perplexity / dense")
    depth_axis(cost, len(found.by(found.reductions[0])))
    cost.set_xlabel("layer whose block is merged")
    return svg(drawn)


def written() -> dict[str, str]:
    results = KeptByReductions.all(HERE)
    parts = {"setting": setting, "reductions": by_reduction, "ridge": by_ridge}
    return {name: part(results) for name, part in parts.items()} | {"default": short(RIDGE)}


def setting(results: list[KeptByReductions]) -> str:
    return bullets(*(found.headline() for found in results))


def by_reduction(results: list[KeptByReductions]) -> str:
    """`affine better`: at how many layers, paired by window."""
    last = ("perplexity / dense: median", "most (layer)", "affine better")
    head = ("model", "reduction", "output kept: median", "least (layer)", *last)
    lines = []
    for found in results:
        for name in found.reductions:
            rows = found.by(name)
            least, most = min(rows, key=lambda k: k.explained), max(rows, key=found.cost)
            worst = interval(found.cost(most), *interval_of(most.windows - found.dense))
            middle = float(np.median([k.explained for k in rows])), float(np.median([found.cost(k) for k in rows]))
            kept, cost = percent(middle[0]), short(middle[1])
            cells = (f"{percent(least.explained)} ({least.layer})", cost, f"{worst} ({most.layer})")
            pairs = zip(found.by("affine"), rows, strict=True)
            wins = sum(interval_of(a.windows - b.windows)[1] < 1 for a, b in pairs)
            better = None if name == "affine" else f"{wins} of {len(rows)}"
            lines.append((found.name, f"`{name}`", kept, *cells, better))
    return table(head, lines)


def by_ridge(results: list[KeptByReductions]) -> str:
    """Median over layers of what the fit keeps; last what the default keeps less than the best ridge of each layer."""
    head = ("model", "tokens", *(f"ridge {r:g}" for r in RIDGES), "default less the best, mean")
    lines = []
    for f in results:
        for t in TOKENS:
            some = [r for r in f.ridges if r.tokens == t]
            default = next(r.explained for r in some if r.ridge == RIDGE)
            lost = float(default.mean() - np.max([r.explained for r in some], 0).mean())
            lines.append((f.name, t, *(percent(float(np.median(r.explained))) for r in some), percent(lost)))
    return table(head, lines)


if __name__ == "__main__":
    run_command(main, HERE / "{model}.json", written)
