"""Does the sensitivity hierarchy survive a method that looks at activations (§6.1, Table 7), and does the Lyapunov
budget follow the regret of layers (§6.4)?

    python experiments/3_compression/sensitivity_spread/run.py [--model MODEL] [--text FILE]

One component of all layers, or all components of one layer, at 50 % by each method. Writes spread.json, one
sensitivity a method, and spread.svg.
"""

from pathlib import Path

import numpy as np
from scipy import stats

import lyapunov_prune as lp
from experiments.common import Model, draw, inputs, run_command
from experiments.statements import measured, ranked, short, table
from lyapunov_prune.report.drawing import COLOURS, log_axis, one_panel, svg
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

HERE = Path(__file__).parent
METHODS = {"weight-only": COLOURS["bi"], "magnitude": COLOURS["rho, token pooling"], "wanda": COLOURS["rho"]}


def main(model: Model = Model(), text: str = "builtin", tokens: int = 1024, context: int = 256) -> None:
    folder = model.folder(HERE)
    given = inputs(model, text, tokens, context)
    profile = given.profile()
    found_by = {
        method: lp.measure_sensitivity(
            given.loaded.model,
            given.evaluation,
            studies=("component", "layer"),
            method=method,
            sparsity=0.5,
            calibration=given.calibration,
            profile=profile,
            folder=given.jobs / f"spread-{method}-{given.evaluation.text_hash[:16]}",
            batch_size=2,
        )
        for method in METHODS
    }
    for method, found in found_by.items():
        found.save(folder / f"{method}.json")
    draw(folder, {"spread": figure(found_by)})


def figure(measured: dict[str, lp.sensitivity.Sensitivity]) -> str:
    page, axes = one_panel(6.5, 3.4)
    width = 0.8 / len(measured)
    for k, (method, found) in enumerate(measured.items()):
        rows = found.of("component")
        x = np.arange(len(rows)) + (k - (len(measured) - 1) / 2) * width
        bars = found.perplexity * np.abs(rows[["low", "high"]].to_numpy().T - rows.degradation.to_numpy())
        axes.bar(x, rows.regret, width, yerr=bars, capsize=2, label=method, color=METHODS[method])
        axes.set_xticks(np.arange(len(rows)), [label.rpartition(".")[2] for label in rows.label])
    log_axis(axes)
    axes.set_ylabel("regret (perplexity)")
    axes.legend(frameon=False, fontsize=8)
    return svg(page)


def written(folder: Path = HERE) -> dict[str, str]:
    """The spread of each method; regrets of layers below 0.001 read as that."""
    rows: list[list[object]] = []
    for method in METHODS:
        found = Sensitivity.load(folder / f"{method}.json")
        components, layers = found.of("component"), found.of("layer")
        least, most = components.loc[components.regret.idxmin()], components.loc[components.regret.idxmax()]
        names = [row.label.rpartition(".")[2] for row in (least, most)]
        budget = stats.spearmanr(1 / found.scores["amplification"], layers.regret).statistic
        rows.append(
            [
                method,
                *(f"{short(float(row.regret))} ({name})" for row, name in zip((least, most), names, strict=True)),
                float(most.regret / least.regret),
                float(layers.regret.max() / layers.regret.clip(lower=1e-3).min()),
                ranked(float(budget), len(layers)),
            ]
        )
    head = ["method", "least regret", "most", "most / least", "layers, most / least", "1/A against layer regret"]
    return {
        "setting": measured(found.measured_on, found.perplexity),
        "spread": table(head, rows),
    }


if __name__ == "__main__":
    run_command(main, HERE / "wanda.json", written)
