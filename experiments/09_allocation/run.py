"""Where to spend the sparsity: every schedule with Wanda at 50 % and 70 % (§6.4, Table 7).

    python experiments/09_allocation/run.py [MODEL] [--text FILE]

Writes allocation.json and allocation.svg beside this file.
"""

from pathlib import Path

import typer

import lyapunov_prune as lp
from experiments.common import draw, texts
from experiments.compressions import Setting, compressions_figure, evaluate_compressions

HERE = Path(__file__).parent
SCHEDULES = ("uniform", "atp", "owl", "alpha-pruning", "lyapunov", "lyapunov-budget", "guidelines")


def main(model: str = "smollm2-135m", text: str = "builtin") -> None:
    loaded = lp.load(model)
    calibration, evaluation = texts(loaded, text, calibration=2048, evaluation=4096, context=512)
    profile = lp.measure_contraction(loaded.model, calibration, seeds=range(2))
    settings = [Setting("wanda", schedule, sparsity=s) for s in (0.5, 0.7) for schedule in SCHEDULES]
    table = evaluate_compressions(loaded.model, settings, calibration, evaluation, profile=profile)
    table.save(HERE / "allocation.json")
    draw(HERE, {"allocation": compressions_figure(table)})
    print(table)


if __name__ == "__main__":
    typer.run(main)
