"""Retrieval without attentions or MLPs: nDCG@10, beside what the paper prints in its Table 1a.

    python experiments/4_hierarchy/retrieval/run.py [--model MODEL] --passages FILE --other FILE.jsonl [--text FILE]

The first sentence of a passage looks for the rest of it, as in `verdicts`, by the cosine of mean final states. Writes
MODEL.json beside this file; what all of them say goes into README.md by `make tables`.
"""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from scipy import stats

from experiments.common import Model, plain, read_text, run_command
from experiments.hierarchies import makers
from experiments.published import RETRIEVAL
from experiments.retrieval import evaluate_retrieval
from experiments.statements import bullets, short, table
from lyapunov_prune.data.batch import rows_measured_on
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
MODELS = ("attention − 4", "attention − 8", "MLP − 4", "MLP − 8")
PRINTED = ("attention − 8", "MLP − 8")  # of 32 layers
VERDICTS = importlib.import_module("experiments.4_hierarchy.verdicts.run")


@dataclass(frozen=True)
class Searched(Result):
    """`ndcg`: nDCG@10 of every query, (models, queries), the dense model first, by set of passages."""

    models: tuple[str, ...]
    ndcg: dict[str, np.ndarray]
    documents: int
    calibrated_on: MeasuredOn
    measured_on: MeasuredOn

    def headline(self) -> str:
        return f"{self.measured_on.line()}; left out by {self.calibrated_on.line()}"


def main(
    passages: Annotated[str, typer.Option(help="a text with a passage a line")],
    other: Annotated[str, typer.Option(help="a JSONL of `text`")],
    model: Model = Model(),
    text: str = "builtin",
    tokens: int = 2048,
    context: int = 512,
    count: Annotated[int, typer.Option(help="queries of each set")] = 48,
    read: Annotated[int, typer.Option(help="tokens of a query or document")] = 32,
) -> None:
    loaded = model.load()
    calibration = read_text(loaded, text, tokens, context)
    lines = Path(passages).read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line)["text"] for line in Path(other).read_text(encoding="utf-8").splitlines()]
    sets = {passages: lines, other: [" ".join(row.split()) for row in rows]}
    tasks = {plain(name): VERDICTS.sought(VERDICTS.passages(found), count) for name, found in sets.items()}
    made = makers(loaded, calibration)
    models = {"dense": loaded.model, **{name: made[name]() for name in MODELS}}
    found = {
        name: evaluate_retrieval(models, loaded.tokenizer, task, context=read, batch_size=8).ndcg
        for name, task in tasks.items()
    }
    asked = [text for task in tasks.values() for text in (*task.queries.values(), *task.documents.values())]
    ids = [loaded.tokenizer(text, add_special_tokens=False)["input_ids"][:read] for text in asked]
    origin = rows_measured_on(loaded.model, ids, f"passages of {', '.join(tasks)}", bos=False)
    most = max(len(task.documents) for task in tasks.values())
    Searched(tuple(models), found, most, calibration.measured_on(loaded.model), origin).save(
        HERE / f"{origin.model.name}.json"
    )


def written() -> dict[str, str]:
    results = [Searched.load(path) for path in sorted(HERE.glob("*.json"), reverse=True)]
    return {"setting": setting(results), "table-1a": table_1a(results)}


def setting(results: list[Searched]) -> str:
    first = results[0]
    queries = next(iter(first.ndcg.values())).shape[1]
    return bullets(*(r.headline() for r in results), f"{queries} queries among {first.documents} documents of each set")


def table_1a(results: list[Searched]) -> str:
    """nDCG@10 in per cent, ours with its interval, and what is left of the dense model's."""
    rows: list[list[object]] = []
    for r in results:
        for name, ndcg in r.ndcg.items():
            dense, rest = ndcg[0], dict(zip(r.models[1:], ndcg[1:], strict=True))
            attention, mlp = (rest[name] for name in PRINTED)
            cells = [_mean(dense), *(f"{_mean(x)}, {_of(x.mean(), dense.mean())}" for x in (attention, mlp))]
            rows.append([f"**{r.measured_on.model.name}**, {name}", *cells, _mean(mlp - attention)])
    for name, values in RETRIEVAL.items():
        rows.append([f"E5-Mistral, {name}", *_printed(values)])
    single = np.mean([values for name, values in RETRIEVAL.items() if name != "average"], 0)
    rows.append(["E5-Mistral, mean of these rows", *_printed(tuple(single.round(1)))])
    head = ["model, passages", "dense", *(f"{name}, of dense" for name in PRINTED), "MLPs − attentions, points"]
    return table(head, rows)


def _mean(x: np.ndarray) -> str:
    """Per cent, with Student's 95 % interval over queries."""
    half = stats.t.ppf(0.975, len(x) - 1) * stats.sem(x)
    low, high = (short(100 * float(x.mean() + side * half)) for side in (-1, 1))
    return f"{short(100 * float(x.mean()))} ({low} to {high})".replace("-", "−")


def _of(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _printed(values: tuple[float, ...]) -> list[str]:
    dense, *rest = values
    return [
        f"*{dense:g}*",
        *(f"*{x:g}*, {_of(x, dense)}" for x in rest),
        f"*{rest[1] - rest[0]:+.1f}*".replace("-", "−"),
    ]


if __name__ == "__main__":
    run_command(main, HERE / "{model}.json", written)
