"""Low ranks stored as two factors beside whole layers removed: perplexity at the same number of parameters.

    python experiments/3_compression/two_factors/run.py [--model MODEL] --text builtin --text A.txt --text B.jsonl

Ranks and layers are chosen on one half of a text; perplexity is measured on the other. Writes MODEL-TEXT.json beside
this file, one a text; what all of them say goes into README.md by `make tables`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Inputs, on_each_text
from experiments.compressions import told
from experiments.statements import bullets, counted, percent, ratio, runs, table
from lyapunov_prune.export.factors import with_factors
from lyapunov_prune.progress import track
from lyapunov_prune.ranking.candidates import least
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
METHOD, SPARSITIES, HALF = "whitened-svd", (0.1, 0.2, 0.4), 0.2  # in bfloat16 the last


@dataclass(frozen=True)
class Cut:
    """What is left: its parameters over the dense model's, and the loss of every window; of layers, which went."""

    way: str
    sparsity: float
    kept: float
    removed: tuple[int, ...]
    windows: np.ndarray


@dataclass(frozen=True)
class FactorsOnOneText(Result):
    dense: np.ndarray
    cuts: tuple[Cut, ...]
    measured_on: MeasuredOn
    calibrated_on: MeasuredOn

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "way": c.way,
                "sparsity": c.sparsity,
                "kept": c.kept,
                "layers": runs(c.removed),
                "× dense": float(np.exp((c.windows - self.dense).mean())),
            }
            for c in self.cuts
        )

    def headline(self) -> str:
        return f"{self.measured_on.line()}; by {self.calibrated_on.line()}; dense perplexity {ratio(self.dense)}"

    def by(self, way: str) -> dict[float, Cut]:
        return {c.sparsity: c for c in self.cuts if c.way == way}


def measure(given: Inputs) -> FactorsOnOneText:
    model, total = given.loaded.model, given.loaded.model.num_parameters()
    cuts = []
    for sparsity in track(SPARSITIES, "two factors"):
        done = lp.compress(model, given.calibration, method=METHOD, sparsity=sparsity)
        small = with_factors(done.model, done.report.ranks)
        kept = small.num_parameters() / total
        cuts.append(Cut("factors", sparsity, kept, (), losses(small, given)))
        gone = layers_for(given, 1 - kept)
        fewer = lp.remove_layers(model, gone)
        cuts.append(Cut("layers", sparsity, fewer.num_parameters() / total, gone, losses(fewer, given)))
    dense = losses(model, given)
    on, chosen_on = (batch.measured_on(model) for batch in (given.evaluation, given.calibration))
    model.bfloat16()
    done = lp.compress(model, given.calibration, method=METHOD, sparsity=HALF)
    small = with_factors(done.model, done.report.ranks)
    cuts.append(Cut("bfloat16, dense", HALF, 1.0, (), losses(done.model, given)))
    cuts.append(Cut("bfloat16, factors", HALF, small.num_parameters() / total, (), losses(small, given)))
    return FactorsOnOneText(dense, tuple(cuts), on, chosen_on)


def losses(model: PreTrainedModel, given: Inputs) -> np.ndarray:
    return lp.perplexity(model, given.evaluation).windows


def layers_for(given: Inputs, share: float) -> tuple[int, ...]:
    """The least layers by Block Influence that hold `share` of the parameters or more."""
    influence = given.profile().influence.influence
    layers = given.loaded.structure.layers
    total = given.loaded.model.num_parameters()
    for count in range(1, len(layers)):
        gone = least(influence, count, tuple(range(len(layers))))
        if sum(p.numel() for i in gone for p in layers[i].parameters()) >= share * total:
            return gone
    raise ValueError(f"no number of layers holds {share:.0%} of the parameters")


def written() -> dict[str, str]:
    results = [FactorsOnOneText.load(path) for path in sorted(HERE.glob("*.json"))]
    parts = {"setting": setting, "cuts": cuts_table, "summary": summary, "half": half}
    return {name: part(results) for name, part in parts.items()}


def setting(results: Sequence[FactorsOnOneText]) -> str:
    return bullets(*(r.headline() for r in results))


def cuts_table(results: Sequence[FactorsOnOneText]) -> str:
    rows = []
    for r in results:
        for sparsity, factors in r.by("factors").items():
            layers = r.by("layers")[sparsity]
            rows.append(
                [
                    f"{r.measured_on.model.name}, {Path(r.measured_on.text).stem}",
                    f"{sparsity:g}",
                    percent(factors.kept),
                    ratio(factors.windows - r.dense),
                    f"{runs(layers.removed)}: {percent(layers.kept)}",
                    ratio(layers.windows - r.dense),
                ]
            )
    header = ("model, text", "sparsity", "factors: parameters left", "× dense", "layers gone: left", "× dense")
    return table(header, rows)


def summary(results: Sequence[FactorsOnOneText]) -> str:
    lines = []
    for name, own in groupby(results, key=lambda r: r.measured_on.model.name):
        mine = list(own)
        for sparsity in SPARSITIES:
            pairs = [(r.by("factors")[sparsity], r.by("layers")[sparsity]) for r in mine]
            lines.append(
                f"{name}, {counted(len(mine), 'text')}, sparsity {sparsity:g}: perplexity of the factors against that "
                f"without layers by `bi` of as many parameters or a few more: {compared(pairs)}."
            )
    return bullets(*lines)


def half(results: Sequence[FactorsOnOneText]) -> str:
    lines = []
    for name, own in groupby(results, key=lambda r: r.measured_on.model.name):
        pairs = [(r.by("bfloat16, factors")[HALF], r.by("bfloat16, dense")[HALF]) for r in own]
        lines.append(
            f"{name}, {counted(len(pairs), 'text')}, bfloat16, sparsity {HALF:g}: factors against the same low ranks "
            f"written dense: {compared(pairs, 4)}."
        )
    return bullets(*lines)


def compared(pairs: Sequence[tuple[Cut, Cut]], digits: int = 3) -> str:
    words = Counter(told(a, b) for a, b in pairs)
    counts = ", ".join(f"{word} {count}" for word, count in words.most_common())
    over = [float(np.exp((a.windows - b.windows).mean())) for a, b in pairs]
    least, most = (f"{x:.{digits}g}" for x in (min(over), max(over)))
    return f"{counts}; {least if least == most else f'{least} to {most}'} times the other's"


main = on_each_text(measure, HERE)

if __name__ == "__main__":
    typer.run(main)
