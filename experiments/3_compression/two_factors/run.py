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
from typing import ClassVar

import numpy as np
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Inputs, on_each_text, run_command
from experiments.compressions import ALIKE, told
from experiments.statements import percent, ratio, runs, table
from experiments.unseen import OnUnseenText, settings
from lyapunov_prune.export.factors import with_factors
from lyapunov_prune.progress import track
from lyapunov_prune.ranking.candidates import least

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
class FactorsOnOneText(OnUnseenText):
    cuts: tuple[Cut, ...]

    DONE: ClassVar[str] = "by"

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
    origins = given.origins  # before the model is rounded
    model.bfloat16()
    done = lp.compress(model, given.calibration, method=METHOD, sparsity=HALF)
    small = with_factors(done.model, done.report.ranks)
    cuts.append(Cut("bfloat16, dense", HALF, 1.0, (), losses(done.model, given)))
    cuts.append(Cut("bfloat16, factors", HALF, small.num_parameters() / total, (), losses(small, given)))
    return FactorsOnOneText(dense, *origins, tuple(cuts))


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
    results = FactorsOnOneText.all(HERE)
    parts = {"setting": settings, "cuts": cuts_table, "against": against}
    return {name: part(results) for name, part in parts.items()}


def cuts_table(results: Sequence[FactorsOnOneText]) -> str:
    rows = []
    for r in results:
        for sparsity, factors in r.by("factors").items():
            layers = r.by("layers")[sparsity]
            rows.append(
                [
                    r.name,
                    f"{sparsity:g}",
                    percent(factors.kept),
                    ratio(factors.windows - r.dense),
                    f"{runs(layers.removed)}: {percent(layers.kept)}",
                    ratio(layers.windows - r.dense),
                ]
            )
    header = ("model, text", "sparsity", "factors: parameters left", "× dense", "layers gone: left", "× dense")
    return table(header, rows)


def against(results: Sequence[FactorsOnOneText]) -> str:
    """Factors against removed layers, and in bfloat16 against the same low ranks written dense."""
    rows: list[list[object]] = []
    for name, own in groupby(results, key=lambda r: r.measured_on.model.name):
        mine = list(own)
        for sparsity in SPARSITIES:
            pairs = [(r.by("factors")[sparsity], r.by("layers")[sparsity]) for r in mine]
            rows.append([name, f"{sparsity:g}", "layers removed", *compared(pairs)])
        pairs = [(r.by("bfloat16, factors")[HALF], r.by("bfloat16, dense")[HALF]) for r in mine]
        rows.append([name, f"{HALF:g}", "dense, both bfloat16", *compared(pairs)])
    return table(["model", "sparsity", "factors against", "better", "worse", ALIKE, "perplexity / the other's"], rows)


def compared(pairs: Sequence[tuple[Cut, Cut]]) -> list[object]:
    words = Counter(told(a, b) for a, b in pairs)
    over = [float(np.exp((a.windows - b.windows).mean())) for a, b in pairs]
    ends = dict.fromkeys(f"{x:.4g}" for x in (min(over), max(over)))
    return [*(words[word] for word in ("better", "worse", ALIKE)), " to ".join(ends)]


main = on_each_text(measure, HERE)

if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
