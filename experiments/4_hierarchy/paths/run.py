"""Two paths of an error through attention: changed values, and changed weights of attention (Appendix E, eq. 64).

    python experiments/4_hierarchy/paths/run.py [--model MODEL] [--text FILE]

Both models write after the paper's eight prompts that ask for a text, each its own. Writes MODEL.json beside this file;
what all of them say goes into README.md by `make tables`.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.attention_paths import AttentionPaths, attention_paths
from experiments.common import Model, read_text, run_command
from experiments.hierarchies import encoded, makers, measured_on
from experiments.statements import bullets, percent, table
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
MODELS = ("attention − 4", "MLP − 4", "Wanda 50 %", "4 bits, groups of 64", "8 bits, a row")
PARTS = ("value", "weight", "both", "total", "prompt_weight", "prompt_share")


@dataclass(frozen=True)
class Paths(AttentionPaths):
    """Those of one compressed model, as means over the prompts."""

    model: str


@dataclass(frozen=True)
class AllPaths(Result):
    rows: tuple[Paths, ...]
    prompts: int
    calibrated_on: MeasuredOn
    measured_on: MeasuredOn

    def headline(self) -> str:
        return f"{self.measured_on.line()}; compressed on {self.calibrated_on.line()}"


def main(
    model: Model = Model(), text: str = "builtin", tokens: int = 2048, context: int = 512, steps: int = 12
) -> None:
    loaded = model.load()
    calibration = read_text(loaded, text, tokens, context)
    prompts = {name: ids for name, ids in encoded(loaded).items() if not name.startswith("MC")}
    made, rows = makers(loaded, calibration), []
    for name in MODELS:
        small = made[name]()
        each = [attention_paths(loaded.model, small, ids, steps=steps) for ids in prompts.values()]
        means = {part: np.mean([getattr(p, part) for p in each], 0) for part in PARTS}
        rows.append(Paths(**means, layers=each[0].layers, model=name))
    origins = calibration.measured_on(loaded.model), measured_on(loaded, prompts)
    AllPaths(tuple(rows), len(prompts), *origins).save(HERE / f"{origins[0].model.name}.json")


def written() -> dict[str, str]:
    results = [AllPaths.load(path) for path in sorted(HERE.glob("*.json"), reverse=True)]
    steps = results[0].rows[0].value.shape[1]
    return {
        "setting": bullets(
            *(r.headline() for r in results), f"{steps} tokens after each of {results[0].prompts} prompts"
        ),
        "paths": paths(results),
    }


def paths(results: list[AllPaths]) -> str:
    """Medians over layers, at the first step, where both models read the prompt, and as means over the others."""
    rows: list[list[object]] = []
    for r in results:
        for p in r.rows:
            for when, which in (("first", slice(0, 1)), ("later", slice(1, None))):
                value, weight, both, total, *_ = (getattr(p, part)[:, which].mean(1) for part in PARTS)
                medians = [float(np.median(x)) for x in (value, weight, both, total)]
                larger = f"{(weight > value).sum()} of {len(value)}"
                shares = [percent(float(np.nanmean(x[:, which]))) for x in (p.prompt_weight, p.prompt_share)]
                rows.append([r.measured_on.model.name, p.model, when, *medians, larger, *shares])
    terms = ["value path", "weight path", "their product", "whole change", "weight path larger, layers"]
    head = ["model", "compressed", "steps", *terms, "dense weights on the prompt", "change by the prompt"]
    return table(head, rows)


if __name__ == "__main__":
    run_command(main, HERE / "{model}.json", written)
