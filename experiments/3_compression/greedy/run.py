"""Group after group in the order of their regret, at rank 32: the paper's greedy allocation (§5, Figure 7).

    python experiments/3_compression/greedy/run.py [--model MODEL] [--text FILE] [--rescored]

With `--rescored` also the order in which every group left is scored again after each: 36 rounds of all groups.
Writes greedy.json and greedy.svg beside this file; what they say goes into README.md by `make tables`.
"""

from pathlib import Path

import pandas as pd
import typer

from experiments.common import Device, DType, draw, inputs, of_model
from experiments.statements import bullets, interval, percent, short, stated, table
from lyapunov_prune.report.sensitivity import greedy_figure
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

HERE = Path(__file__).parent
RANK = 32  # §5: the greedy rounds are at another rank than the rest
MLP = ("gate_proj", "up_proj", "down_proj")
PAPER_SAVED, PAPER_COST = 0.24, 1.27  # §6.4: 24 % of the multiplications at +27 %


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 1024,
    context: int = 256,
    rescored: bool = False,
) -> None:
    folder = of_model(HERE, model)
    studies = ("greedy", "greedy-rescored") if rescored else ("greedy",)
    result = inputs(model, text, tokens, context, device=device, dtype=dtype).sensitivity(studies, rank=RANK)
    result.save(folder / "greedy.json")
    draw(folder, {"greedy": greedy_figure(result)})
    print(result)


def written(folder: Path = HERE) -> dict[str, str]:
    result = Sensitivity.load(folder / "greedy.json")
    return {"setting": setting(result), "greedy": greedy(result), "verdict": verdict(result)}


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


def verdict(result: Sensitivity) -> str:
    """The cost of the last round below the paper's, which groups were taken, and at which rank."""
    rounds = result.of("greedy")
    bearable = rounds[rounds.degradation <= PAPER_COST]
    best = bearable.loc[bearable.saved.idxmax()] if len(bearable) else None
    most = f"{percent(best.saved)}, at {interval(*_cost(best))} times the perplexity" if best is not None else "nothing"
    groups = rounds.label.str.extract(r"(?P<layer>\d+) (?:.*\.)?(?P<component>\w+)$").astype({"layer": int})
    early = groups.component.isin(MLP) & (groups.layer < result.measured_on.model.num_layers / 3)
    of_mlp = int(groups.component.isin(MLP).sum())
    places = pd.Series(rounds.index + 1).groupby(groups.component).mean().sort_values()
    lines = [
        stated(
            f"up to {PAPER_COST:g} times the perplexity the rounds save {most} (the paper: {percent(PAPER_SAVED)}).",
            "Agrees" if best is not None and best.saved >= PAPER_SAVED else "Differs",
        ),
        stated(
            f"of {len(rounds)} groups taken {of_mlp} are of an MLP, {int(early.sum())} of one in the first third of "
            "the layers (the paper: those last).",
            "Differs" if early.any() else "Agrees",
        ),
        stated(
            "mean round in which a component was taken: "
            f"{', '.join(f'{name} {short(place)}' for name, place in places.items())} (the paper: V first).",
            "Agrees" if places.index[0] == "v_proj" else "Differs",
        ),
    ]
    if result.compression.rank != RANK:
        lines.append(f"**Not the same:** the paper's rounds are at rank {RANK}, these at {result.compression.rank}.")
    return bullets(*lines)


def _cost(row: pd.Series) -> tuple[float, float, float]:
    return float(row.degradation), float(row.low), float(row.high)


if __name__ == "__main__":
    typer.run(main)
