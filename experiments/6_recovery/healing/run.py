"""What a few minutes of distillation bring back after layers are removed (§7, future work 4).

    python experiments/6_recovery/healing/run.py [--model MODEL] [--text FILE]

Writes full.json and low-rank.json beside this file.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import lyapunov_prune as lp
from experiments.common import Model, draw, run_command, texts
from experiments.statements import table
from lyapunov_prune.healing.report import HeldOut
from lyapunov_prune.report.drawing import COLOURS, one_panel, svg
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
STEPS, RANK = 40, 8


@dataclass(frozen=True)
class Course(Result):
    """One run of healing: the distillation loss of each step (nats a token), and the perplexity on other text.

    `rank` is None where all parameters of the layers were trained; `trained` counts what was.
    """

    losses: np.ndarray
    rank: int | None
    trained: int
    recovered: float
    held_out: HeldOut
    measured_on: MeasuredOn


def main(model: Model = Model(), text: str = "builtin", tokens: int = 4096, remove: int = 4) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    calibration, evaluation = texts(loaded, text, calibration=256 * STEPS, evaluation=tokens, context=256)
    influence = lp.block_influence(loaded.model, calibration)
    pruned = lp.remove_layers(loaded.model, lp.rank_layers(None, influence, criterion="bi").plan(remove))
    courses: dict[str, Course] = {}
    for name, rank in (("full", None), ("low-rank", RANK)):
        jobs = model.jobs / f"healing-{name}-{remove}"
        done = lp.heal(pruned, loaded.model, calibration, steps=STEPS, rank=rank, evaluation=evaluation, folder=jobs)
        report = done.report
        assert report.held_out is not None
        assert report.recovered is not None
        courses[name] = Course(
            report.losses, rank, report.trained, report.recovered, report.held_out, report.measured_on
        )
        courses[name].save(folder / f"{name}.json")
    page, axes = one_panel(6.5, 3.0)
    for (name, course), colour in zip(courses.items(), (COLOURS["rho"], COLOURS["bi"]), strict=True):
        axes.plot(course.losses, color=colour, linewidth=1, label=f"{name}, recovered {course.recovered:.0%}")
    axes.set_xlabel("step")
    axes.set_ylabel("KL(dense ‖ pruned), nats a token")
    axes.legend(frameon=False, fontsize=8)
    draw(folder, {"healing": svg(page)})


def written(folder: Path = HERE) -> dict[str, str]:
    """Perplexity before, after and of the dense model, and the share recovered."""
    courses = [Course.load(folder / f"{name}.json") for name in ("full", "low-rank")]
    held_out = courses[0].held_out
    cells: list[list[object]] = [
        ["dense", None, held_out.teacher.value, None],
        ["layers removed", None, held_out.before.value, "0 %"],
    ]
    for course in courses:
        what = "all parameters of the layers" if course.rank is None else f"rank {course.rank}"
        cells.append([f"healed, {what}", course.trained, course.held_out.after.value, f"{course.recovered:.0%}"])
    return {"healing": table(["", "trained parameters", "perplexity", "recovered"], cells)}


if __name__ == "__main__":
    run_command(main, HERE / "full.json", written)
