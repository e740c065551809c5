"""The cliff behind the first layers, at five levels, and what goes with it: Figure 3 and Table 2 (§6.1, §6.3).

    python experiments/03_early_layer_cliff/run.py [MODEL] [--text FILE]

Writes cliff.json, activations.json and the figures beside this file.
"""

from pathlib import Path

import typer

import lyapunov_prune as lp
from experiments.common import draw, inputs
from lyapunov_prune.report.profiles import activation_figure
from lyapunov_prune.report.sensitivity import cliff_figure, levels_figure

HERE = Path(__file__).parent


def main(model: str = "smollm2-135m", text: str = "builtin", tokens: int = 1024, context: int = 256) -> None:
    given = inputs(model, text, tokens, context)
    result = given.sensitivity(("layer0", "cliff", "threshold"))
    result.save(HERE / "cliff.json")
    activations = lp.profiles.activation_statistics(given.loaded.model, given.calibration)
    activations.save(HERE / "activations.json")
    draw(
        HERE,
        {
            "cliff": cliff_figure(result),
            "levels": levels_figure(result),
            "activations": activation_figure(activations),
        },
    )
    print(result, activations, sep="\n\n")


if __name__ == "__main__":
    typer.run(main)
