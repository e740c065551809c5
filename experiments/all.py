"""One command a model: the structural paper's numbers, part by part, into one column.

    python -m experiments.all MODEL [--device cuda --dtype float16] [--calibration FILE --evaluation FILE]
        [--tasks FOLDER]
    python -m experiments.all --summary

MODEL is a folder, a GGUF file, a hub id or smollm2-135m. Whatever is finished is kept in runs/experiments/: the same
command goes on where it was stopped. After each part experiments/columns/NAME.json is written anew, and a part that it
has of the same model and texts is not measured again unless --again is given. --summary shows all columns in Tables 1
to 4 beside the paper's rows; `make tables` writes them into the page of chapter 1.
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
from experiments.columns import (
    ALPHAS,
    Accuracy,
    Answers,
    Blends,
    Bounds,
    Column,
    Contraction,
    Pruning,
    Removal,
    Removed,
    correlation,
)
from experiments.common import Again, Inputs, Model, inputs, plain, plain_tasks, show
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
BETWEEN = tuple(name for name in ALPHAS.values() if "=" in name)  # the blends that no other criterion is
SCORED = ("blend", "bi", "rho", "angular", *BETWEEN, "from-end", "random 0")  # by tasks too, in this order
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
    again: Again = False,
) -> None:
    if summary:
        show(importlib.import_module("experiments.1_contraction.summary.run").written())
        return
    if model is None:
        raise typer.BadParameter("name a model, or give --summary")
    try:
        chosen = lp.evaluation.load_tasks([tasks / f"{task}.jsonl" for task in TASKS]) if tasks else ()
        given = inputs(Model(model, device, dtype), calibration, tokens, context, unseen=evaluation)
        path = COLUMNS / f"{name or Path(plain(model)).name}.json"
        known = Column.load(path) if path.exists() and not again else None
        for column in measure(given, path.stem, chosen, items, known):
            column.save(path)
        print(column)
    except lp.LyapunovPruneError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def measure(
    given: Inputs, name: str, tasks: Sequence[Task] = (), items: int = 300, known: Column | None = None
) -> Iterator[Column]:
    """The column of a model, and again with each part that is added to it, the cheapest first.

    Of each of `tasks` the first `items` are scored. What `known` has of the same model and texts is taken over.
    """
    column = known if known is not None and fits(known, given) else begun(given, name)
    yield column
    for part, made in (("removal", removal), ("blends", blends), ("pruning", pruning), ("bounds", bounds)):
        if getattr(column, part) is None:
            yield (column := replace(column, **{part: made(given)}))
    if tasks:
        for scored in accuracy(given, column, tasks, items):
            yield replace(column, accuracy=scored)


def fits(known: Column, given: Inputs) -> bool:
    """Whether a column is of this model in this dtype and of these texts, on whatever device."""
    pairs = zip((known.calibrated_on, known.measured_on), given.origins, strict=True)
    return all(a.model.same_as(b.model) and (a.dtype, a.text_hash) == (b.dtype, b.text_hash) for a, b in pairs)


def begun(given: Inputs, name: str) -> Column:
    profile = given.profile()
    with given.sweep() as sweep:
        dense = sweep.dense
    low, high = interval_of(dense)
    return Column(
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


def removal(given: Inputs) -> Removal:
    """Every layer removed alone, and the layers that each criterion chooses removed together."""
    profile = given.profile()
    contraction, influence = profile.contraction, profile.influence
    alone = [(layer,) for layer in range(given.loaded.structure.num_layers)]
    chosen = choices(given, {**rankings(given, profile), "blend": blend(profile, 0.5)})
    dense, losses = given.without([*alone, *chosen.values()])
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
        sets=removed(chosen, dense, losses),
    )


def blends(given: Inputs) -> Blends:
    """What the paper's blend chooses at the α that are no other criterion."""
    profile = given.profile()
    between = {name: blend(profile, alpha) for alpha, name in ALPHAS.items() if name in BETWEEN}
    chosen = choices(given, between)
    return Blends(removed(chosen, *given.without(chosen.values())), given.evaluation.measured_on(given.loaded.model))


def blend(profile: LayerProfile, alpha: float) -> Ranking:
    """The paper's, both parts from 0 to 1."""
    return lp.rank_layers(profile.contraction, profile.influence, criterion="blend-minmax", alpha=alpha)


def choices(given: Inputs, ranked: dict[str, Ranking]) -> dict[tuple[str, int], tuple[int, ...]]:
    """The layers that each criterion gives up at each of `COUNTS`."""
    counts = [count for count in COUNTS if count < given.loaded.structure.num_layers]
    return {(name, count): ranking.plan(count).remove for name, ranking in ranked.items() for count in counts}


def removed(
    chosen: dict[tuple[str, int], tuple[int, ...]], dense: np.ndarray, losses: dict[tuple[int, ...], np.ndarray]
) -> tuple[Removed, ...]:
    return tuple(
        Removed(
            criterion,
            count,
            gone,
            float(np.exp(losses[gone].mean())),
            float(np.exp((losses[gone] - dense).mean())),
            *interval_of(losses[gone] - dense),
        )
        for (criterion, count), gone in chosen.items()
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


def pruning(given: Inputs) -> Pruning:
    """Every component in all layers at 50 %, by each method; all matrices by Wanda at rising sparsities; layer 0."""
    profile = given.profile()
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

    Criteria that chose the same layers are scored once, and what the column has is not scored again. Kept is every
    model and task.
    """
    model = given.loaded.model
    origin = given.calibration.measured_on(model)
    sets = [r for part in (column.removal, column.blends) if part for r in part.sets]
    by_priority = sorted((r for r in sets if r.criterion in SCORED), key=lambda r: (SCORED.index(r.criterion), r.count))
    scored: dict[str, ScoredTask] = {}
    known: dict[tuple[tuple[int, ...], str], Answers] = {}
    if column.accuracy is not None:
        files = {task.name: task.sha256 for task in tasks}
        scored = {t.name: t for t in column.accuracy.tasks if (files.get(t.name), items) == (t.sha256, t.items)}
        known = {(a.layers, a.task): a for a in column.accuracy.answers if a.task in scored}
    answers: list[Answers] = []
    for criterion, count, gone in [("dense", 0, ()), *((r.criterion, r.count, r.layers) for r in by_priority)]:
        small: PreTrainedModel | None = None
        for task in tasks:

            def score(task: Task = task, gone: tuple[int, ...] = gone) -> TaskScores:
                nonlocal small
                if small is None:
                    small = lp.remove_layers(model, lp.PruningPlan.given(model, gone)) if gone else model
                return lp.evaluate_tasks({"m": small}, given.loaded.tokenizer, [task], limit=items)

            if (gone, task.name) not in known:
                name = "-".join(map(str, sorted(gone))) or "dense"
                asked = {"without": gone, "task": task.name, "sha256": task.sha256, "items": items}
                # Device and dtype are of the origin: each has files of its own.
                kept = given.sweep_folder.with_name(given.sweep_folder.name.replace("sweep", "tasks"))
                found = once(kept / f"{name}-{task.name}.json", TaskScores, origin, asked, score)
                right = {
                    s.metric: "".join(str(int(one)) for one in s.items)
                    for s in found.scores
                    if s.metric.startswith("acc")
                }
                known[gone, task.name] = Answers(
                    criterion, count, gone, task.name, right["acc"], right.get("acc_norm", "")
                )
                scored |= {t.name: t for t in plain_tasks(found.tasks)}
            answers.append(replace(known[gone, task.name], criterion=criterion, count=count))
        yield Accuracy(tuple(scored[task.name] for task in tasks), tuple(answers), version("lm-eval"))


if __name__ == "__main__":
    typer.run(main)
