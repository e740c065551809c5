"""Why errors contract: growth of the error against growth of the state, and Jacobians (§6.2, Figure 5).

    python experiments/05_residual_growth/run.py [MODEL] [--text FILE]

Writes contraction-EPSILON.json, jacobian.json and the figures beside this file.
"""

from dataclasses import replace
from pathlib import Path

import typer

import lyapunov_prune as lp
from experiments.common import draw, inputs
from lyapunov_prune.report.profiles import growth_figure, jacobian_figure

HERE = Path(__file__).parent
EPSILONS = (1e-3, 1e-2, 1e-1)
WINDOWS, TOKENS = 2, 64  # for the Jacobians, which cost far more a token


def main(model: str = "smollm2-135m", text: str = "builtin", tokens: int = 2048, context: int = 512) -> None:
    given = inputs(model, text, tokens, context)
    profiles = [
        lp.measure_contraction(given.loaded.model, given.calibration, epsilon=epsilon, seeds=range(2))
        for epsilon in EPSILONS
    ]
    for profile in profiles:
        profile.save(HERE / f"contraction-{profile.epsilon:g}.json")
    few = replace(given.calibration, ids=given.calibration.ids[:WINDOWS, :TOKENS])
    jacobian = lp.profiles.sublayer_jacobians(given.loaded.model, few)
    jacobian.save(HERE / "jacobian.json")
    draw(HERE, {"growth": growth_figure(profiles), "jacobian": jacobian_figure(jacobian)})
    print(*profiles, jacobian, sep="\n\n")


if __name__ == "__main__":
    typer.run(main)
