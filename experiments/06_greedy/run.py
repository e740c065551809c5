"""Group after group in the order of their regret, at rank 32: the paper's greedy allocation (§5, Figure 7).

    python experiments/06_greedy/run.py [--model MODEL] [--text FILE] [--rescored]

With `--rescored` also the order in which every group left is scored again after each: 36 rounds of all groups.
Writes greedy.json and greedy.svg beside this file.
"""

from pathlib import Path

import pandas as pd
import typer

from experiments.common import Device, DType, draw, inputs
from experiments.statements import interval, table
from lyapunov_prune.report.sensitivity import greedy_figure
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

HERE = Path(__file__).parent
RANK = 32  # §5: the greedy rounds are at another rank than the rest


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 1024,
    context: int = 256,
    rescored: bool = False,
) -> None:
    studies = ("greedy", "greedy-rescored") if rescored else ("greedy",)
    result = inputs(model, text, tokens, context, device=device, dtype=dtype).sensitivity(studies, rank=RANK)
    result.save(HERE / "greedy.json")
    draw(HERE, {"greedy": greedy_figure(result)})
    print(result)


def written() -> dict[str, str]:
    """What some of the rounds saved, and what they cost."""
    rounds = Sensitivity.load(HERE / "greedy.json").of("greedy")
    rows = [
        [k + 1, rounds.label[k].removeprefix("+ "), f"{rounds.saved[k]:.1%}", interval(*_cost(rounds.loc[k]))]
        for k in (0, 8, 14, 19, len(rounds) - 1)
    ]
    head = ["rounds", "last group added", "multiplications of the layers saved", "perplexity / dense"]
    return {"greedy": table(head, rows)}


def _cost(row: pd.Series) -> tuple[float, float, float]:
    return float(row.degradation), float(row.low), float(row.high)


if __name__ == "__main__":
    typer.run(main)
