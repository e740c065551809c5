"""Group after group in the order of their regret: the paper's greedy allocation (§5, Figure 7).

    python experiments/06_greedy/run.py [MODEL] [--text FILE]

Writes greedy.json and greedy.svg beside this file.
"""

from pathlib import Path

import typer

from experiments.common import draw, inputs
from lyapunov_prune.report.sensitivity import greedy_figure

HERE = Path(__file__).parent


def main(model: str = "smollm2-135m", text: str = "builtin", tokens: int = 1024, context: int = 256) -> None:
    result = inputs(model, text, tokens, context).sensitivity(("greedy",))
    result.save(HERE / "greedy.json")
    draw(HERE, {"greedy": greedy_figure(result)})
    print(result)


if __name__ == "__main__":
    typer.run(main)
