"""Group after group in the order of their regret, at rank 32: the paper's greedy allocation (§5, Figure 7).

    python experiments/3_compression/greedy/run.py [--model MODEL] [--text FILE] [--rescored]

With `--rescored` also the order in which every group left is scored again after each: 36 rounds of all groups.
Writes greedy.json and greedy.svg beside this file.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from experiments.common import Model, draw, inputs, run_command
from experiments.statements import interval, percent, ranked, short, table
from lyapunov_prune.report.sensitivity import greedy_figure
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

HERE = Path(__file__).parent
RANK = 32  # §5: the greedy rounds are at another rank than the rest
PAPER_COST = 1.27  # §6.4: 24 % of the multiplications saved at +27 % of the perplexity


def main(
    model: Model = Model(),
    text: str = "builtin",
    tokens: int = 1024,
    context: int = 256,
    rescored: bool = False,
) -> None:
    folder = model.folder(HERE)
    studies = ("greedy", "greedy-rescored") if rescored else ("greedy",)
    result = inputs(model, text, tokens, context).sensitivity(studies, rank=RANK)
    result.save(folder / "greedy.json")
    draw(folder, {"greedy": greedy_figure(result)})


def written(folder: Path = HERE) -> dict[str, str]:
    result = Sensitivity.load(folder / "greedy.json")
    rounds = result.of("greedy")
    bearable = rounds[rounds.degradation <= PAPER_COST]
    best = bearable.loc[bearable.saved.idxmax()]
    return {
        "setting": setting(result),
        "greedy": greedy(result),
        "components": components(rounds),
        "saved": percent(best.saved),
        "its cost": interval(*_cost(best)),
        "budget": budget(result),
    }


def budget(result: Sensitivity) -> str:
    """Spearman's correlation of both readings of the Lyapunov budget with the rounds, and where they put the tolerance.

    A layer comes with the first round that takes a group of it.
    """
    A = np.array(result.scores["amplification"])
    layer = result.of("greedy").label.str.extract(r"(\d+) ")[0].astype(int).to_numpy()
    taken, first = np.unique(layer, return_index=True)
    third = len(A) // 3
    rows: list[list[object]] = []
    for name, tolerance in (("1/A", 1 / A), ("A", A)):
        orders = [(tolerance[layer], np.arange(len(layer))), (tolerance[taken], first)]
        shown = [ranked(float(stats.spearmanr(*pair).statistic), len(pair[0])) for pair in orders]
        shares = [float(part.sum() / tolerance.sum()) for part in (tolerance[:third], tolerance[-third:])]
        rows.append([name, *shown, *map(percent, shares)])
    rows.append(["GPT-2 Small", "*weakly*", None, "*19 %*", "*54 %*"])
    head = ["budget", "with the round, groups", "with the first round, layers", "to the first third", "to the last"]
    return table(head, rows)


def components(rounds: pd.DataFrame) -> str:
    """How often a component was taken, and in which round in the mean, the first first."""
    places = pd.Series(rounds.index + 1).groupby(rounds.label.str.extract(r"(\w+)$")[0]).agg(["size", "mean"])
    return table(["component", "groups taken", "mean round"], places.sort_values("mean").itertuples())


def setting(result: Sensitivity) -> str:
    line = result.measured_on.line()
    return f"Every group: {result.compression}. {line}. Dense perplexity: {short(result.perplexity)}.\n"


def greedy(result: Sensitivity) -> str:
    """What some of the rounds saved, and what they cost."""
    rounds = result.of("greedy")
    rows = [
        [k + 1, rounds.label[k].removeprefix("+ "), percent(rounds.saved[k]), interval(*_cost(rounds.loc[k]))]
        for k in (0, 8, 14, 19, len(rounds) - 1)
    ]
    return table(["rounds", "last group added", "multiplications of the layers saved", "perplexity / dense"], rows)


def _cost(row: pd.Series) -> tuple[float, float, float]:
    return float(row.degradation), float(row.low), float(row.high)


if __name__ == "__main__":
    run_command(main, HERE / "greedy.json", written)
