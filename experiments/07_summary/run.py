"""One model's column of the paper's Table 1: contraction, 50 % Wanda, s*, violations of the bounds.

    python experiments/07_summary/run.py [MODEL] [--text FILE]

Writes summary.json beside this file.
"""

import json
from pathlib import Path

import typer

import lyapunov_prune as lp
from experiments.common import inputs

HERE = Path(__file__).parent
CHECKED_TOKENS, CHECKED_CONTEXT = 128, 64  # for the bounds: thirty settings of every matrix


def main(model: str = "smollm2-135m", text: str = "builtin", tokens: int = 1024, context: int = 256) -> None:
    given = inputs(model, text, tokens, context)
    dense, profile = given.loaded.model, given.profile().contraction
    found = lp.measure_sensitivity(
        dense, given.evaluation, studies=("sparsity", "threshold"), method="wanda", calibration=given.calibration
    )
    half = found.of("sparsity").set_index("sparsity").loc[0.5]
    few = lp.load_text(text, given.loaded.tokenizer, tokens=CHECKED_TOKENS, context=CHECKED_CONTEXT)
    bounds = lp.bounds.check_grid(dense, few, folder=given.jobs / "bounds", resume=True)
    contracting, transitions = profile.contracting
    summary = {
        "model": model,
        "parameters": dense.num_parameters(),
        "layers": given.loaded.structure.num_layers,
        "width": given.loaded.structure.config.hidden_size,
        "perplexity": found.perplexity,
        "contracting": f"{contracting}/{transitions}",
        "mean rho": float(profile.rho.mean()),
        "median rho": float(sorted(profile.rho)[len(profile.rho) // 2]),
        "norm growth K": float(profile.norm_growth.mean()),
        "CV of K over windows": float(profile.norm_growth.std() / profile.norm_growth.mean()),
        "degradation at 50 % Wanda": float(half.degradation),
        "s*": found.threshold,
        "regret limit of s*": found.limit,
        "bound checks": bounds.checks,
        "violations": len(bounds.violations),
        "measured on": found.measured_on.line(),
        "calibrated on": found.calibrated_on.line() if found.calibrated_on else None,
        "bounds checked on": bounds.measured_on.line(),
    }
    (HERE / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for name, value in summary.items():
        print(f"{name:<26} {value}")


if __name__ == "__main__":
    typer.run(main)
