"""Compressing from the first layer on and from the last layer back: the paper's Figure 4 (§6.1).

    python experiments/04_forward_backward/run.py [--model MODEL] [--text FILE]

Writes cumulative.json and cumulative.svg beside this file.
"""

from pathlib import Path

import typer

from experiments.common import Device, DType, draw, inputs
from experiments.statements import table
from lyapunov_prune.report.sensitivity import cumulative_figure
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

HERE = Path(__file__).parent


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 1024,
    context: int = 256,
) -> None:
    result = inputs(model, text, tokens, context, device=device, dtype=dtype).sensitivity(("forward", "backward"))
    result.save(HERE / "cumulative.json")
    draw(HERE, {"cumulative": cumulative_figure(result)})
    print(result)


def written() -> dict[str, str]:
    """Perplexity by the number of layers compressed, from either end."""
    found = Sensitivity.load(HERE / "cumulative.json")
    ends = {"from the first on": found.of("forward"), "from the last back": found.of("backward")}
    counts = [n for n in (1, 2, 3, 4, 8, 15, 22, 30) if n <= len(ends["from the first on"])]
    rows = [[name, *(float(frame.perplexity[n - 1]) for n in counts)] for name, frame in ends.items()]
    return {"cumulative": table(["layers compressed", *map(str, counts)], rows)}


if __name__ == "__main__":
    typer.run(main)
