"""One command a model: the structural paper's numbers, part by part, into one column.

    python -m experiments.all MODEL [--device cuda --dtype float16] [--calibration FILE --evaluation FILE]
        [--tasks FOLDER]
    python -m experiments.all --summary

MODEL is a folder, a GGUF file, a hub id or smollm2-135m. Whatever is finished is kept in runs/experiments/: the same
command goes on where it was stopped. After each part experiments/columns/NAME.json is written anew. --summary shows all
columns in Tables 1, 2 and 3 beside the paper's rows; `make tables` writes them into the page of chapter 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.columns import Accuracy, Answers, Bounds, Column, Contraction, Pruning, Removal, Removed, correlation
from experiments.common import Inputs, Model, inputs, plain, plain_tasks, show
from lyapunov_prune.evaluation.perplexity import interval_of
from lyapunov_prune.evaluation.task_scores import ScoredTask, TaskScores
from lyapunov_prune.evaluation.tasks import Task
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.ranking.angular import AngularDistance
from lyapunov_prune.ranking.ranking import Ranking
from lyapunov_prune.results.store import once

COLUMNS = Path(__file__).parent / "columns"
COUNTS = (4, 8)  # of the paper's Table 3
LOTS = (0, 1, 2)  # the paper draws thrice
METHODS = ("weight-only", "wanda")  # the paper's simplified Wanda, and Wanda
TASKS = ("hellaswag", "arc_easy", "winogrande", "piqa")
SCORED = ("blend", "bi", "rho", "angular", "from-end", "random 0")  # by tasks too, in this order
CHECKED = 2, 64  # windows × tokens of the calibration text, for the bounds: thirty settings of every matrix


def main(
    model: Annotated[str | None, typer.Argument(help="folder, GGUF file, hub id or smollm2-135m")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto is the GPU if there is one")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="of the weights; the checkpoint's if not given")] = None,
    tokens: Annotated[int, typer.Option(help="to calibrate on, and as many to evaluate on")] = 4096,
    context: int = 1024,
    calibration: Annotated[str, typer.Option(help="builtin, or a file")] = "builtin",
    evaluation: Annotated[str | None, typer.Option(help="a file; the other half of --calibration if not given")] = None,
    tasks: Annotated[Path | None, typer.Option(help=f"folder of {', '.join(f'{t}.jsonl' for t in TASKS)}")] = None,
    items: Annotated[int, typer.Option(help="of each task")] = 300,
    name: Annotated[str | None, typer.Option(help="of the column; the model's if not given")] = None,
    summary: Annotated[bool, typer.Option("--summary", help="show the tables of all columns, measure nothing")] = False,
) -> None:
    if summary:
        show(importlib.import_module("experiments.1_contraction.summary.run").written())
        return
    if model is None:
        raise typer.BadParameter("name a model, or give --summary")
    try:
        chosen = lp.evaluation.load_tasks([tasks / f"{task}.jsonl" for task in TASKS]) if tasks else ()
        given = inputs(Model(model, device, dtype), calibration, tokens, context, unseen=evaluation)
        for column in measure(given, name or Path(plain(model)).name, chosen, items):
            column.save(COLUMNS / f"{column.name}.json")
        print(column)
    except lp.LyapunovPruneError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def measure(given: Inputs, name: str, tasks: Sequence[Task] = (), items: int = 300) -> Iterator[Column]:
    """The column of a model, and again with each part that is added to it, the cheapest first.

    Of each of `tasks` the first `items` are scored.
    """
    profile = given.profile()
    with given.sweep() as sweep:
        dense = sweep.dense
    low, high = interval_of(dense)
    column = Column(
        name=name,
        architecture=given.loaded.structure.model_type,
        parameters=given.loaded.model.num_parameters(),
        layers=given.loaded.structure.num_layers,
        width=given.loaded.structure.config.hidden_size,
        perplexity=float(np.exp(dense.mean())),
        low=low,
        high=high,
        measured_on=given.evaluation.measured_on(given.loaded.model),
        calibrated_on=profile.measured_on,
        contraction=contraction(profile.contraction),
    )
    yield column
    yield (column := replace(column, removal=removal(given, profile, dense)))
    yield (column := replace(column, pruning=pruning(given, profile)))
    yield (column := replace(column, bounds=bounds(given)))
    if tasks:
        for scored in accuracy(given, column, tasks, items):
            yield replace(column, accuracy=scored)


def contraction(profile: ContractionProfile) -> Contraction:
    growth = profile.norm_growth
    return Contraction(
        rho=profile.rho,
        interval=profile.rho_interval,
        rho_token=profile.pooled("token").rho,
        below_floor=profile.below_floor,
        growth=float(growth.mean()),
        growth_cv=float(growth.std() / growth.mean()),
        epsilon=profile.epsilon,
        seeds=profile.seeds,
    )


def removal(given: Inputs, profile: LayerProfile, dense: np.ndarray) -> Removal:
    """Every layer removed alone, and the layers that each criterion chooses removed together."""
    layers, contraction, influence = given.loaded.structure.num_layers, profile.contraction, profile.influence
    alone = [(layer,) for layer in range(layers)]
    ranked = {**rankings(given, profile), "blend": lp.rank_layers(contraction, influence, criterion="blend-minmax")}
    chosen = {
        (criterion, count): plan.remove
        for criterion, ranking in ranked.items()
        for count in COUNTS
        if count < layers
        for plan in [ranking.plan(count)]
    }
    _, losses = given.without([*alone, *chosen.values()])
    regret = np.exp([losses[gone].mean() for gone in alone]) - np.exp(dense.mean())
    scores = {
        "|rho − 1|": np.abs(contraction.rho - 1),
        "|rho − 1|, token pooling": np.abs(contraction.pooled("token").rho - 1),
        "bi": influence.influence,
        "residual change": influence.change,
        "angular": turned(given).begins(1),
    }
    return Removal(
        regret=regret,
        correlations=tuple(correlation(name, values, regret) for name, values in scores.items()),
        sets=tuple(
            Removed(
                criterion,
                count,
                gone,
                float(np.exp(losses[gone].mean())),
                float(np.exp((losses[gone] - dense).mean())),
                *interval_of(losses[gone] - dense),
            )
            for (criterion, count), gone in chosen.items()
        ),
    )


def rankings(given: Inputs, profile: LayerProfile) -> dict[str, Ranking]:
    contraction, influence = profile.contraction, profile.influence
    return {
        "rho": lp.rank_layers(contraction, criterion="rho"),
        "rho, token pooling": lp.rank_layers(contraction.pooled("token"), criterion="rho"),
        "bi": lp.rank_layers(None, influence, criterion="bi"),
        "blend": lp.rank_layers(contraction, influence, criterion="blend"),
        "angular": turned(given),
        "from-end": lp.rank_layers(contraction, criterion="from-end"),
        **{f"random {seed}": lp.rank_layers(contraction, criterion="random", seed=seed) for seed in LOTS},
    }


def turned(given: Inputs) -> AngularDistance:
    path = given.jobs / f"angular-{given.calibration.text_hash[:16]}.json"
    origin = given.calibration.measured_on(given.loaded.model)
    return once(
        path, AngularDistance, origin, {}, lambda: lp.ranking.angular_distance(given.loaded.model, given.calibration)
    )


def pruning(given: Inputs, profile: LayerProfile) -> Pruning:
    """Every component in all layers at 50 %, by each method; all matrices by Wanda at rising sparsities; layer 0."""
    measured = {
        method: lp.measure_sensitivity(
            given.loaded.model,
            given.evaluation,
            studies=("component", "sparsity", "threshold") if method == "wanda" else ("component",),
            method=method,
            sparsity=0.5,
            calibration=given.calibration,
            profile=profile,
            folder=given.sweep_folder,
        )
        for method in METHODS
    }
    wanda = measured["wanda"]
    uniform, first = wanda.of("sparsity"), wanda.of("threshold")
    half = uniform.set_index("sparsity").loc[0.5]
    return Pruning(
        degradation=float(half.degradation),
        low=float(half.low),
        high=float(half.high),
        uniform={f"{row.sparsity:g}": float(row.degradation) for row in uniform.itertuples()},
        components={
            method: {row.label: float(row.regret) for row in result.of("component").itertuples()}
            for method, result in measured.items()
        },
        threshold=wanda.threshold,
        first_layer={f"{row.sparsity:g}": float(row.regret) for row in first.itertuples()},
        limit=wanda.limit,
    )


def bounds(given: Inputs) -> Bounds:
    windows, context = CHECKED
    few = replace(given.calibration, ids=given.calibration.ids[:windows, :context])
    report = lp.bounds.check_grid(given.loaded.model, few, folder=given.jobs / f"bounds-{few.text_hash[:16]}")
    return Bounds(report.checks, len(report.violations), len(report.settings), report.measured_on)


def accuracy(given: Inputs, column: Column, tasks: Sequence[Task], items: int) -> Iterator[Accuracy]:
    """The dense model on every task, then without the layers that each criterion chose, again after each of them.

    Criteria that chose the same layers are scored once. Kept is every model and task.
    """
    model = given.loaded.model
    origin = given.calibration.measured_on(model)
    sets = column.removal.sets if column.removal else ()
    by_priority = sorted((r for r in sets if r.criterion in SCORED), key=lambda r: (SCORED.index(r.criterion), r.count))
    scored: list[ScoredTask] = []
    answers: list[Answers] = []
    for criterion, count, gone in [("dense", 0, ()), *((r.criterion, r.count, r.layers) for r in by_priority)]:
        small: PreTrainedModel | None = None
        for task in tasks:

            def score(task: Task = task, gone: tuple[int, ...] = gone) -> TaskScores:
                nonlocal small
                if small is None:
                    small = lp.remove_layers(model, lp.PruningPlan.given(model, gone)) if gone else model
                return lp.evaluate_tasks({"m": small}, given.loaded.tokenizer, [task], limit=items)

            name = "-".join(map(str, sorted(gone))) or "dense"
            asked = {"without": gone, "task": task.name, "sha256": task.sha256, "items": items}
            # Device and dtype are of the origin: each has files of its own.
            kept = given.sweep_folder.with_name(given.sweep_folder.name.replace("sweep", "tasks"))
            found = once(kept / f"{name}-{task.name}.json", TaskScores, origin, asked, score)
            right = {
                s.metric: "".join(str(int(one)) for one in s.items) for s in found.scores if s.metric.startswith("acc")
            }
            answers.append(Answers(criterion, count, gone, task.name, right["acc"], right.get("acc_norm", "")))
            if criterion == "dense":
                scored += plain_tasks(found.tasks)
        yield Accuracy(tuple(scored), tuple(answers), version("lm-eval"))


if __name__ == "__main__":
    typer.run(main)
