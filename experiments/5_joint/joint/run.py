"""What `joint` decides on a real model, point by point: the map, the choice, and the score at the end (MAP).

    lyapunov-prune joint smollm2-135m --remove 8 -o smaller
    python experiments/5_joint/joint/run.py smaller
    python experiments/5_joint/joint/run.py fewer --vit

Takes over joint.json of a finished run as MODEL.json and draws its map as MODEL.svg, beside this file; what it says
goes into README.md by `make tables`. With --vit it first makes that run, with the ViT that 5_joint/vit trains.
"""

from pathlib import Path

import typer

from experiments.common import Model, draw
from experiments.images import VIT
from experiments.recoveries import IMAGES, subject
from experiments.statements import bullets, percent, short, table
from lyapunov_prune.joint import remove_jointly
from lyapunov_prune.joint.result import REPORT, JointRun
from lyapunov_prune.report.joint import joint_figure

HERE = Path(__file__).parent


def main(finished: Path, vit: bool = False) -> None:
    if vit:
        of = subject(Model(VIT, "cpu", "float32"), "", 0, 0)
        remove_jointly(
            of.model,
            None,
            of.data,
            finished,
            remove=8,
            reduction="identity",
            recipe=of.recipe,
            folder=of.jobs,
            batch_size=IMAGES,
        )
    run = JointRun.load(finished / REPORT)
    name = run.plan.model.name
    run.save(HERE / f"{name}.json")
    draw(HERE, {name: joint_figure(run.map, run.decision)})


def written() -> dict[str, str]:
    runs = [JointRun.load(path) for path in sorted(HERE.glob("*.json"))]
    return {"setting": setting(runs), "degrees": degrees(runs), "pairs": pairs(runs), "outcome": outcome(runs)}


def setting(runs: list[JointRun]) -> str:
    lines = []
    for run in runs:
        points, recipe = run.points, run.points.recipe
        weights = f"updates of rank {recipe.rank}" if recipe.rank else "all weights of the layers"
        lines += [
            f"{run.plan.model.name}: learnt from {points.measured_on[0].line()}; selected by "
            f"{points.measured_on[1].line()}; scored at the end on {run.measured_on.line()}",
            f"{int(points.first.sum())} points, {points.steps} steps each, {len(run.losses)} at the end; {weights}; "
            f"reduction {run.importance.reduction}; importance by {run.importance.method}, "
            f"{run.importance.items} items; {short(sum(run.seconds.values()) / 60)} minutes",
        ]
    return bullets(*lines)


def unit(run: JointRun) -> str:
    return "of top-1 accuracy" if run.measured_on.images else "nats a token"


def four(score: float) -> str:
    return f"{score:.4g}".replace("-", "−")


def degrees(runs: list[JointRun]) -> str:
    """Leave-two-out RMSE of each degree."""
    tried = sorted({degree for run in runs for degree in run.map.errors})
    rows = [(run.plan.model.name, *(run.map.errors.get(d) for d in tried), run.map.degree) for run in runs]
    return table(("model", *(f"degree {d}" for d in tried), "chosen"), rows)


def pairs(runs: list[JointRun]) -> str:
    """The pairs of the budget: what the map predicts, and the points among them."""
    rows = []
    for run in runs:
        decision, points = run.decision, run.points
        measured = {
            tuple(p): s for p, s, first in zip(points.pairs.tolist(), points.scores, points.first, strict=True) if first
        }
        for place, (a, g) in enumerate(decision.pairs.tolist()):
            low, high = decision.low[place], decision.high[place]
            predicted = f"{four(decision.predicted[place])} ({four(low)} to {four(high)})"
            score = four(measured[a, g]) if (a, g) in measured else None
            said = "chosen" if place == decision.best else "within the noise" if decision.within[place] else ""
            rows.append((run.plan.model.name, a, g, predicted, score, said))
    head = ("model", "attentions", "activations", "predicted, 95 % of one more recovery", "recovered point", "")
    return table(head, rows)


def outcome(runs: list[JointRun]) -> str:
    """What was removed, how certain that is, and what it costs on the final slice (± two standard errors)."""
    noise = ("noise", "pairs within twice of it", "the choice can cost", "spread over seeds", "around the map")
    head = ("model", "attentions", "activations", *noise, "lost at the end", "parameters", "bytes")
    rows = []
    for run in runs:
        decision, (before, after), (large, small) = run.decision, run.parameters, run.size
        spreads = float(decision.noise), int(decision.within.sum()) - 1, float(decision.regret)
        lost = f"{short(run.dense - run.chosen)} ± {short(2 * run.error)} {unit(run)}"
        sizes = percent(after / before), percent(small / large)
        around = float(decision.over_seeds[0]), float(decision.residual[0])
        rows.append((run.plan.model.name, *decision.chosen, *spreads, *around, lost, *sizes))
    return table(head, rows)


if __name__ == "__main__":
    typer.run(main)
