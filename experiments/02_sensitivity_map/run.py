"""Which component of which layer can bear compression: the paper's Figure 2 and its two hierarchies (§6.1).

    python experiments/02_sensitivity_map/run.py [MODEL] [--text FILE]

Writes sensitivity.json and the figures beside this file.
"""

from pathlib import Path

import typer

from experiments.common import draw, inputs
from lyapunov_prune.report.sensitivity import sensitivity_figures

HERE = Path(__file__).parent


def main(model: str = "smollm2-135m", text: str = "builtin", tokens: int = 1024, context: int = 256) -> None:
    result = inputs(model, text, tokens, context).sensitivity(
        ("group", "layer", "component", "sparsity", "rank", "removal")
    )
    result.save(HERE / "sensitivity.json")
    draw(HERE, sensitivity_figures(result))
    print(result)


if __name__ == "__main__":
    typer.run(main)
