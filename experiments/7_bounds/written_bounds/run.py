"""Do the bounds hold for what compression really writes, and how far below them do errors lie?

    python experiments/7_bounds/written_bounds/run.py --model smollm2-135m --tokens 256

Four compressions in memory, each checked against the dense model on text that none has seen. Writes this model's part
of written.json, compression by compression; what stands there is not measured again. Draws written.svg of all models.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

import lyapunov_prune as lp
from experiments.common import Again, Model, draw, run, texts
from experiments.statements import bullets, percent, runs, span, table
from lyapunov_prune.bounds.report import EDGES, BoundsReport
from lyapunov_prune.report.drawing import COLOURS, panels, svg
from lyapunov_prune.results.files import write_whole

HERE = Path(__file__).parent
FILE = HERE / "written.json"
CALIBRATION, CONTEXT = 4096, 256
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "magnitude, 50 %": {"method": "magnitude", "sparsity": 0.5},
    "wanda, 50 %": {"method": "wanda", "sparsity": 0.5},
    "wanda, 2:4": {"method": "wanda", "sparsity": 0.5, "pattern": (2, 4)},
    "rtn, 4 bits": {"method": "rtn", "bits": 4},
}


def main(model: Model = Model(), text: str = "builtin", tokens: int = 256, again: Again = False) -> None:
    loaded = model.load()
    calibration, evaluation = texts(loaded, text, calibration=CALIBRATION, evaluation=tokens, context=CONTEXT)
    on = evaluation.measured_on(loaded.model)
    line, seen = on.line(), calibration.measured_on(loaded.model).line()
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    mine = known.get(on.model.name, {})
    if again or (mine.get("line"), mine.get("calibration")) != (line, seen):  # another text's are not kept beside these
        mine = known[on.model.name] = {"line": line, "calibration": seen, "compressions": {}}
    for name, options in COMPRESSIONS.items():
        if name in mine["compressions"]:
            print(f"{name} is already measured, see {FILE}; give --again to measure it anew")
            continue
        small = lp.compress(loaded.model, calibration, **options).model
        report = lp.bounds.check_written(loaded.model, small, evaluation)
        print(f"{name}\n{report}\n{report.alignment}\n", flush=True)
        mine["compressions"][name] = row(report)
        write_whole(FILE, json.dumps(known, indent=1, allow_nan=False) + "\n")
    draw(HERE, {"written": figure(known)})


def row(report: BoundsReport) -> dict[str, Any]:
    """The numbers of one compression, as JSON holds them; of layers that an error reaches, all but the first."""
    distribution, alignment, decisions = report.distribution, report.alignment, report.decisions
    assert distribution is not None
    assert alignment is not None
    assert decisions is not None
    reached = ~np.isnan(alignment.share)
    medians = report.to_frame().groupby("component", sort=False)["median"].median()
    return {
        "matrices": len(report.names),
        "inputs": report.inputs,
        "violations": len(report.violations),
        "passed": report.passed,
        **dict(zip(("least", "median", "quantile_99", "largest"), distribution.overall.tolist(), strict=True)),
        "counts": distribution.counts.tolist(),
        "medians": medians.to_dict(),
        "attained": float(np.nanmin(report.attained)),
        "error": report.composition[-1].error,
        "composed": report.composition[-1].bound,
        "gamma": report.gamma,
        "reached": int(reached.sum()),
        "align": alignment.align[reached].tolist(),
        "gain": alignment.gain[reached].tolist(),
        "kappa": alignment.kappa[reached].tolist(),
        "meets": alignment.meets[reached].tolist(),
        "share": alignment.share[reached].tolist(),
        "certified": int(decisions.certified.sum()),
        "changed": int(decisions.changed.sum()),
        "predictions": len(decisions.changed),
    }


def figure(models: dict[str, Any]) -> str:
    """Share of the inputs by error / bound; a panel a model, a line a compression."""
    page, rows = panels(6.5, 1 + 2.2 * len(models), len(models))
    colours = ("rho", "rho, token pooling", "bi", "blend")
    for axes, (model, measured) in zip(rows, models.items(), strict=True):
        for (name, of), colour in zip(measured["compressions"].items(), colours, strict=False):
            share = 100 * np.array(of["counts"]) / sum(of["counts"])
            axes.stairs(share[:-1], EDGES, label=name, color=COLOURS[colour])
        axes.set_title(Path(model).name, fontsize=9)
        axes.set_ylabel("inputs, %")
        axes.legend(frameon=False, fontsize=8)
    rows[-1].set_xlabel("error / bound")
    return svg(page)


def written() -> dict[str, str]:
    """The tables and numbers of the page, from written.json."""
    models = json.loads(FILE.read_text(encoding="utf-8"))
    named = [(Path(path).name, name, of) for path, m in models.items() for name, of in m["compressions"].items()]
    every = [of for *_, of in named]
    ratios = [
        [model, name, of["matrices"], of["inputs"], of["violations"]]
        + [float(of[key]) for key in ("least", "median", "quantile_99", "largest")]
        for model, name, of in named
    ]
    composed = [
        (model, name, of["error"], of["composed"], of["composed"] / of["error"], of["gamma"], _stay(of), of["changed"])
        for model, name, of in named
    ]
    theorem = [
        [model, name, *(_three(of[key]) for key in ("align", "gain", "kappa")), _met(of), percent(np.mean(of["share"]))]
        for model, name, of in named
    ]
    return {
        "measured-on": bullets(*(f"{m['line']}; calibration: {m['calibration']}" for m in models.values())),
        "ratios": table(["model", "compression", *_RATIOS], ratios),
        "composed": table(["model", "compression", *_COMPOSED], composed),
        "theorem-10": table(["model", "compression", *_THEOREM], theorem),
        "violations": str(sum(of["violations"] for of in every)),
        "inputs": f"{sum(of['inputs'] for of in every):,}",
        "median": span(of["median"] for of in every),
        "largest": span(of["largest"] for of in every),
        "quotient": span(of["composed"] / of["error"] for of in every),
        "gamma": span(of["gamma"] for of in every),
        "tokens": span(100 * float(np.mean(of["share"])) for of in every),
    }


_RATIOS = "matrices", "inputs", "violations", "least", "median", "99 %", "largest"
_COMPOSED = "error after the last layer", "estimate", "quotient", "γ", "predictions proven to stay", "that changed"
_THEOREM = "align, by layer", "gain", "κ", "layers that meet it", "tokens that meet it"


def _three(numbers: list[float]) -> str:
    """Least, median and largest of the layers."""
    return " / ".join(f"{value:.2g}" for value in np.quantile(numbers, (0, 0.5, 1)))


def _stay(of: dict[str, Any]) -> str:
    return f"{of['certified']} of {of['predictions']}"


def _met(of: dict[str, Any]) -> str:
    """An error reaches all layers but the first, so the first entry is of layer 1."""
    return f"layer {runs(layer for layer, meets in enumerate(of['meets'], start=1) if meets)}, of {of['reached']}"


if __name__ == "__main__":
    run(main)
