"""Compressing from the first layer on and from the last layer back: the paper's Figure 4 (§6.1).

    python experiments/04_forward_backward/run.py [MODEL] [--text FILE]

Writes cumulative.json and cumulative.svg beside this file.
"""

from pathlib import Path

import typer

from experiments.common import draw, inputs
from lyapunov_prune.report.sensitivity import cumulative_figure

HERE = Path(__file__).parent


def main(model: str = "smollm2-135m", text: str = "builtin", tokens: int = 1024, context: int = 256) -> None:
    result = inputs(model, text, tokens, context).sensitivity(("forward", "backward"))
    result.save(HERE / "cumulative.json")
    draw(HERE, {"cumulative": cumulative_figure(result)})
    print(result)


if __name__ == "__main__":
    typer.run(main)
