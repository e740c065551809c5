"""Compressing from the first layer on and from the last layer back: the paper's Figure 4 (§6.1).

    python experiments/1_contraction/forward_backward/run.py [--model MODEL] [--text FILE]

Writes cumulative.json and cumulative.svg beside this file.
"""

from pathlib import Path
from typing import Any

from experiments.common import Model, draw, inputs, run_command
from experiments.statements import measured, short, table
from lyapunov_prune.report.sensitivity import cumulative_figure
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

HERE = Path(__file__).parent


def main(model: Model = Model(), text: str = "builtin", tokens: int = 1024, context: int = 256) -> None:
    folder = model.folder(HERE)
    result = inputs(model, text, tokens, context).sensitivity(("forward", "backward"))
    result.save(folder / "cumulative.json")
    draw(folder, {"cumulative": cumulative_figure(result)})


def written(folder: Path = HERE) -> dict[str, str]:
    """Perplexity by the number of layers compressed, from either end."""
    found = Sensitivity.load(folder / "cumulative.json")
    ends = {"from the first on": found.of("forward"), "from the last back": found.of("backward")}
    layers = len(ends["from the first on"])
    counts = sorted({n for n in (1, 2, 3, 4, 8, layers // 2, 3 * layers // 4, layers) if 0 < n <= layers})
    rows: list[list[Any]] = [[name, *(float(frame.perplexity[n - 1]) for n in counts)] for name, frame in ends.items()]
    return {
        "setting": measured(found.measured_on, found.perplexity),
        "cumulative": table(["layers compressed", *map(str, counts)], rows),
        "ratio": short(rows[0][1] / rows[1][1]),
    }


if __name__ == "__main__":
    run_command(main, HERE / "cumulative.json", written)
