"""Sampled decoding beside greedy: how long a compressed model writes the dense model's text (representation
hierarchies, §7.1, whose texts are greedy).

    python experiments/4_hierarchy/sampled_decoding/run.py [--model MODEL] --text A.txt --unseen B.txt

Both models go on from the beginnings of windows of `--unseen`, greedily, and by draws that are the same for both; what
is compressed is so on the beginning of `--text`. Writes decoding.json beside this file, of another model in a folder by
its name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from scipy import stats
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, run_command
from experiments.hierarchies import interval, makers
from experiments.statements import bullets, correlation, table
from experiments.statements import interval as said
from experiments.unseen import two_texts
from lyapunov_prune.evaluation.repetition import repetition
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
MODELS = (
    "layers − 4",
    "attention − 4",
    "attention − 8",
    "MLP − 4",
    "Wanda 50 %",
    "4 bits, groups of 64",
    "8 bits, a row",
)
GREEDY = "greedy"
SEEDS = (0, 1, 2)
WAYS = (GREEDY, *(f"seed {seed}" for seed in SEEDS))


@dataclass(frozen=True)
class Texts:
    """A compressed model beside the dense one, a row a way to decode, a column a prompt.

    `first`: the first step at which the texts differ, the number of steps if none does; `dense` and `compressed`: the
    share of 3-grams that were in the text before.
    """

    model: str
    first: np.ndarray
    dense: np.ndarray
    compressed: np.ndarray


@dataclass(frozen=True)
class SampledDecoding(Result):
    steps: int
    ways: tuple[str, ...]
    texts: tuple[Texts, ...]
    calibrated_on: MeasuredOn
    measured_on: MeasuredOn

    def headline(self) -> str:
        prompts = self.texts[0].first.shape[1]
        return (
            f"{self.steps} tokens after each of {prompts} beginnings of windows, greedily and by the draws of "
            f"{len(self.ways) - 1} seeds, T = 1: {self.measured_on.line()}; compressed on {self.calibrated_on.line()}"
        )


def main(
    text: Annotated[str, typer.Option(help="to compress on")],
    unseen: Annotated[str, typer.Option(help="to begin texts with")],
    model: Model = Model(),
    tokens: int = 2048,
    prompts: int = 16,
    context: Annotated[int, typer.Option(help="tokens of a window")] = 256,
    begins: Annotated[int, typer.Option(help="tokens of it that a text begins with")] = 64,
    steps: Annotated[int, typer.Option(help="tokens of each text")] = 32,
) -> None:
    loaded = model.load()
    learnt, begun, _ = two_texts(loaded, (text, tokens), (unseen, prompts * context), context, context)
    begun = replace(begun, ids=begun.ids[:, :begins])
    origins = learnt.measured_on(loaded.model), begun.measured_on(loaded.model)
    about, made = {"texts": encode(origins), "steps": steps}, makers(loaded, learnt)
    with Store(model.jobs / "sampled-decoding", "sampled decoding", about) as store:
        for name in MODELS:
            if name not in store:
                store.add(name, compared(loaded.model, made[name](), begun, steps))
        rows = {name: {key: np.array(x) for key, x in store[name].items()} for name in MODELS}
    found = SampledDecoding(steps, WAYS, tuple(Texts(name, **row) for name, row in rows.items()), *origins)
    found.save(model.folder(HERE) / "decoding.json")


def compared(
    dense: PreTrainedModel, model: PreTrainedModel, begun: lp.TokenBatch, steps: int
) -> dict[str, list[list[float]]]:
    rows: dict[str, list[list[float]]] = {"first": [], "dense": [], "compressed": []}
    for seed in (None, *SEEDS):
        found = lp.compare_generation(dense, model, begun, steps=steps, seed=seed)
        rows["first"].append([float(step) for step in found.first_difference])
        rows["dense"].append([repetition(tokens, 3) for tokens in found.dense_tokens])
        rows["compressed"].append([repetition(tokens, 3) for tokens in found.compressed_tokens])
    return rows


def written(folder: Path = HERE) -> dict[str, str]:
    found = SampledDecoding.load(folder / "decoding.json")
    return {"setting": bullets(found.headline()), "texts": texts(found), "order": order(found)}


def both(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A number a prompt: greedy, and the mean over seeds."""
    return values[0], values[1:].mean(0)


def texts(found: SampledDecoding) -> str:
    """`draws part`: against greedy texts of the same prompts (Wilcoxon's test, 5 %)."""
    repeated = ("3-grams repeated, greedy", "dense", "by draws", "dense")
    rows = []
    for each in found.texts:
        greedy, drawn = both(each.first)
        change = drawn - greedy
        p = stats.wilcoxon(change).pvalue if change.any() else 1.0
        side = "not decided" if p >= 0.05 else "later" if change.mean() > 0 else "earlier"
        pairs = zip(both(each.compressed), both(each.dense), strict=True)
        same = [said(*interval(x)) for x in (greedy, drawn)]
        rows.append((each.model, *same, side, *(f"{said(*(100 * interval(x)))} %" for pair in pairs for x in pair)))
    return table(("", "same to step, greedy", "by draws", "draws part", *repeated), rows)


def order(found: SampledDecoding) -> str:
    """Spearman, over models, of how long texts stay the same: greedy with draws."""
    means = [[x.mean() for x in both(each.first)] for each in found.texts]
    return correlation(*stats.spearmanr(*np.array(means).T))


if __name__ == "__main__":
    run_command(main, HERE / "decoding.json", written)
