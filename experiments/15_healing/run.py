"""What a few minutes of distillation bring back after layers are removed (§7, future work 4).

    python experiments/15_healing/run.py [--model MODEL] [--text FILE]

Writes full.json and low-rank.json beside this file.
"""

from pathlib import Path

import typer

import lyapunov_prune as lp
from experiments.common import Device, DType, draw, job_folder, load, of_model, texts
from experiments.statements import table
from lyapunov_prune.healing.heal import Healing
from lyapunov_prune.report.drawing import COLOURS, one_panel, svg

HERE = Path(__file__).parent
STEPS, RANK = 40, 8


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 4096,
    remove: int = 4,
) -> None:
    folder = of_model(HERE, model)
    loaded = load(model, device, dtype)
    calibration, evaluation = texts(loaded, text, calibration=256 * STEPS, evaluation=tokens, context=256)
    influence = lp.block_influence(loaded.model, calibration)
    pruned = lp.remove_layers(loaded.model, lp.rank_layers(None, influence, criterion="bi").plan(remove))
    reports = {}
    for name, rank in (("full", None), ("low-rank", RANK)):
        jobs = job_folder(model) / f"healing-{name}-{remove}"
        done = lp.heal(
            pruned, loaded.model, calibration, steps=STEPS, rank=rank, evaluation=evaluation, folder=jobs, resume=True
        )
        done.report.save(folder / f"{name}.json")
        reports[name] = done.report
        print(done.report, end="\n\n")
    page, axes = one_panel(6.5, 3.0)
    for (name, report), colour in zip(reports.items(), (COLOURS["rho"], COLOURS["bi"]), strict=True):
        axes.plot(report.losses, color=colour, linewidth=1, label=f"{name}, recovered {report.recovered:.0%}")
    axes.set_xlabel("step")
    axes.set_ylabel("KL(dense ‖ pruned), nats a token")
    axes.legend(frameon=False, fontsize=8)
    draw(folder, {"healing": svg(page)})


def written(folder: Path = HERE) -> dict[str, str]:
    """Perplexity before, after and of the dense model, and the share recovered."""
    reports = {name: Healing.load(folder / f"{name}.json") for name in ("full", "low-rank")}
    held_out = reports["full"].held_out
    assert held_out is not None
    cells: list[list[object]] = [
        ["dense", None, held_out.teacher.value, None],
        ["layers removed", None, held_out.before.value, "0 %"],
    ]
    for report in reports.values():
        assert report.held_out is not None
        what = "all parameters of the layers" if report.rank is None else f"rank {report.rank}"
        cells.append([f"healed, {what}", report.trained, report.held_out.after.value, f"{report.recovered:.0%}"])
    return {"healing": table(["", "trained parameters", "perplexity", "recovered"], cells)}


if __name__ == "__main__":
    typer.run(main)
