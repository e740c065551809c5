"""Tasks of both kinds with attention or MLPs left out: multiple choice beside answers in the model's own words.

    python experiments/4_hierarchy/two_kinds/run.py [--model MODEL] --choices FILE.jsonl… --questions FILE.jsonl \
        [--text FILE]

Figure 1 and Table 1 of Representation hierarchies. Scores are lm-evaluation-harness' (extra `tasks`). Writes
choices.json, answers.json and kinds.svg beside this file.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from scipy import stats

import lyapunov_prune as lp
from experiments.common import Model, draw, plain_tasks, run_command, texts
from experiments.hierarchies import without_branches
from experiments.statements import interval, short, table
from lyapunov_prune.evaluation.task_scores import TaskScores
from lyapunov_prune.predictions.verdict import wilson
from lyapunov_prune.report.drawing import COLOURS, GREY, panels, svg

HERE = Path(__file__).parent
COUNTS = (0, 4, 8)
KINDS: dict[Literal["attention", "mlp"], str] = {"attention": "rho", "mlp": "bi"}
SHOWN = {"acc": "accuracy", "collapsed": "answers that end in a cycle", "repeated 3-grams": "3-grams repeated"}


def main(
    choices: Annotated[list[str], typer.Option(help="items of multiple choice")],
    questions: Annotated[str, typer.Option(help="questions and answers")],
    model: Model = Model(),
    text: str = "builtin",
    tokens: int = 2048,
    items: int = 80,
    answers: int = 16,
) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    calibration, _ = texts(loaded, text, calibration=tokens, evaluation=tokens, context=512)
    influence = lp.profiles.sublayer_influence(loaded.model, calibration)
    models = {"dense": loaded.model}
    for kind in KINDS:
        for count in COUNTS[1:]:
            gone = lp.ranking.rank_sublayers(influence, kind).order[:count]
            models[name(kind, count)] = without_branches(loaded.model, **{kind: gone})
    chosen = lp.evaluate_tasks(models, loaded.tokenizer, lp.evaluation.load_tasks(choices), limit=items, batch_size=4)
    chosen = replace(chosen, tasks=plain_tasks(chosen.tasks))
    chosen.save(folder / "choices.json")
    asked = lp.evaluation.load_tasks([questions], few_shot=2)
    answered = lp.evaluate_tasks(models, loaded.tokenizer, asked, limit=answers, batch_size=8)
    answered = replace(answered, tasks=plain_tasks(answered.tasks))
    answered.save(folder / "answers.json")
    draw(folder, {"kinds": figure(chosen, answered)})


def name(kind: str, count: int) -> str:
    return f"{kind} − {count}" if count else "dense"


def figure(chosen: lp.evaluation.TaskScores, written: lp.evaluation.TaskScores) -> str:
    page, axes = panels(6.5, 6.0, 3)
    for ax, (metric, label) in zip(axes, SHOWN.items(), strict=True):
        scores = chosen if metric == "acc" else written
        for t, task in enumerate(scores.tasks):
            for k, (kind, colour) in enumerate(KINDS.items()):
                found = [scores.score(name(kind, count), task.name, metric) for count in COUNTS]
                ax.errorbar(
                    np.array(COUNTS) + 0.12 * (k + 2 * t - 1.5),
                    [s.value for s in found],
                    yerr=[1.96 * s.error for s in found],
                    marker="os^D"[t],
                    markersize=4,
                    capsize=2,
                    linewidth=0.9,
                    color=COLOURS[colour],
                    label=f"{task.name}, {kind}",
                )
            if metric == "acc":
                ax.axhline(task.chance, color=GREY, linewidth=0.7, linestyle=":")
        ax.set_ylim(-0.03, 1.03)
        ax.set_ylabel(label, fontsize=8)
        ax.legend(frameon=False, fontsize=7, ncols=2)
    axes[-1].set_xticks(COUNTS)
    axes[-1].set_xlabel("attentions or MLPs left out, of least Block Influence first")
    return svg(page)


def written(folder: Path = HERE) -> dict[str, str]:
    """Every score with its standard error, and how far from guessing a choice is."""
    chosen, answered = (TaskScores.load(folder / f"{name}.json") for name in ("choices", "answers"))
    scores: list[list[object]] = []
    guessing: list[list[object]] = []
    for kind in (chosen, answered):
        for task, metric in dict.fromkeys((s.task, s.metric) for s in kind.scores):
            values = [kind.score(model, task, metric) for model in kind.models]
            scores.append([f"{task}, {metric}", *(f"{short(s.value)} ± {short(s.error)}" for s in values)])
    for choice in chosen.tasks:
        right = [round(chosen.score(model, choice.name, "acc").value * choice.items) for model in chosen.models]
        p = [stats.binomtest(k, choice.items, choice.chance, alternative="greater").pvalue for k in right]
        guessing.append([f"{choice.name} ({short(choice.chance)})", *(float(x) for x in p)])
    last, asked = chosen.models[-1], answered.tasks[0]
    return {
        "setting": setting(chosen, answered),
        "scores": table(["", *chosen.models], scores),
        "guessing": table(["p, accuracy above guessing", *chosen.models], guessing),
        "cycles": share(answered.score(last, asked.name, "collapsed").value, asked.items),
    }


def setting(chosen: TaskScores, answered: TaskScores) -> str:
    sizes = "; ".join(f"{t.name}: {t.items} items, {t.few_shot} shown" for t in (*chosen.tasks, *answered.tasks))
    return f"{sizes}. {chosen.measured_on[0].line()}.\n"


def share(mean: float, items: int) -> str:
    """Percent, with Wilson's 95 % interval."""
    return f"{interval(*(100 * x for x in (mean, *wilson(mean, items))))} %"


if __name__ == "__main__":
    run_command(main, HERE / "answers.json", written)
