"""The cliff behind the first layers, at five levels, and what goes with it: Figure 3 and Table 2 (§6.1, §6.3).

    python experiments/1_contraction/early_layer_cliff/run.py [--model MODEL] [--text FILE]

Writes cliff.json, activations.json and the figures beside this file. What they say goes into README.md by
`make tables`.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import typer
from scipy import stats

import lyapunov_prune as lp
from experiments.common import Device, DType, draw, inputs, of_model
from experiments.statements import bullets, goes_with, ranked, runs, short, span, table
from lyapunov_prune.profiles import ActivationStatistics
from lyapunov_prune.report.profiles import activation_figure
from lyapunov_prune.report.sensitivity import cliff_figure, levels_figure
from lyapunov_prune.sensitivity import Sensitivity

HERE = Path(__file__).parent
PAPER_AFTER = 2  # GPT-2 Small: "drops sharply between layers 2 and 3"
SINK = 5  # effective rank this many times lower than with every token weighed alike: a few tokens are the covariance
SIGNS = {  # what the paper associates with the early-layer catastrophe (§6.1)
    "effective_rank": ("low rank of the outputs", -1),
    "kurtosis": ("heavy tails of the inputs", 1),
    "sparsity": ("low sparsity of the inputs", -1),
}


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 1024,
    context: int = 256,
) -> None:
    folder = of_model(HERE, model)
    given = inputs(model, text, tokens, context, device=device, dtype=dtype)
    result = given.sensitivity(("layer0", "cliff", "threshold"))
    result.save(folder / "cliff.json")
    activations = lp.profiles.activation_statistics(given.loaded.model, given.calibration)
    activations.save(folder / "activations.json")
    draw(
        folder,
        {
            "cliff": cliff_figure(result),
            "levels": levels_figure(result),
            "activations": activation_figure(activations),
        },
    )
    print(result, activations, *written(folder).values(), sep="\n\n")


def written(folder: Path = HERE) -> dict[str, str]:
    result = Sensitivity.load(folder / "cliff.json")
    activations = ActivationStatistics.load(folder / "activations.json")
    return {
        "setting": setting(result),
        "cliff": cliff_table(result),
        "verdict": verdict(result),
        "signs": signs(result, activations),
    }


def degradations(result: Sensitivity) -> pd.DataFrame:
    """Perplexity over that of the dense model: a row a layer, a column a level."""
    return result.of("cliff").pivot(index="layer", columns="sparsity", values="degradation")


def setting(result: Sensitivity) -> str:
    calibration = result.calibrated_on
    assert calibration is not None
    return (
        f"{result.measured_on.line()}.\nCalibration and activations: {calibration.tokens} tokens of {calibration.text} "
        f"({calibration.split}, {calibration.text_hash[:12]}).\nDense perplexity: {short(result.perplexity)}.\n"
    )


def cliff_table(result: Sensitivity) -> str:
    """The layers that more than double the perplexity, each level a column, and the span of all others."""
    levels = degradations(result)
    component = result.of("cliff").component[0].rpartition(".")[2]
    header = [f"`{component}` of layer", *(f"sparsity {s:g}" for s in levels.columns)]
    shown = sorted(doubled(levels))
    others = levels.drop(index=shown)
    rows = [[layer, *levels.loc[layer]] for layer in shown]
    return table(header, [*rows, [runs(others.index), *(span(others[s]) for s in levels.columns)]])


def verdict(result: Sensitivity) -> str:
    """Where the cliff is, level by level: the largest quotient of the degradations of a layer and of the next."""
    levels = degradations(result)
    drops = pd.DataFrame(levels.to_numpy()[:-1] / levels.to_numpy()[1:], columns=levels.columns)
    places, sizes, count = drops.idxmax(), drops.max(), len(levels.columns)
    if places.nunique() == 1:
        place = places.iloc[0]
        invariant = f"**Agrees:** the place of the cliff is the same at all {count} levels."
        where = f"at all {count} levels the largest drop from one layer to the next is after layer {place}"
    else:
        place = None
        each = ", ".join(f"after layer {layer} at {n}" for layer, n in places.value_counts().items())
        invariant = "**Differs:** the place of the cliff is not the same at all levels."
        where = f"the largest drop from one layer to the next is {each} of {count} levels"
    theirs = "the paper's, on GPT-2 Small, lies between layers 2 and 3"
    if PAPER_AFTER in drops.index and place != PAPER_AFTER:
        theirs += f", where this model's perplexities part by {span(drops.loc[PAPER_AFTER])} times"
    behind = {layer for layer in doubled(levels) if layer > places.min()}
    layer0, star = result.of("layer0"), result.threshold
    regrets = (f"{short(row.regret)} at {100 * row.sparsity:g} %" for row in result.of("threshold").itertuples())
    return bullets(
        invariant,
        f"**{'Agrees' if place == PAPER_AFTER else 'Differs'}:** {where}, by {span(sizes)} times; {theirs}.",
        f"Behind it this one matrix more than doubles the perplexity in layer {runs(behind)}, at one level or more.",
        f"Layer 0 as a whole at rank {result.compression.rank}: {span(layer0.degradation)} times the perplexity, at "
        f"{len(layer0)} sparsities from {layer0.sparsity.min():g} to {layer0.sparsity.max():g}.",
        f"Layer 0 by Wanda, full rank: regret {', '.join(regrets)}. **s\\* = {star or 'none of these'}** for a regret "
        f"below {result.limit:g} (the paper, whose limit its text has lost: 0.5 for GPT-2 Small, 0.6 for Qwen3.5-2B).",
    )


def doubled(levels: pd.DataFrame) -> set[int]:
    """The layers that more than double the perplexity at one level or more."""
    return set(levels.index[(levels > 2).any(axis=1)])


def signs(result: Sensitivity, activations: ActivationStatistics) -> str:
    """Whether the paper's three properties go with harm, the logarithm of the degradation, mean over the levels."""
    component = result.of("cliff").component[0]
    frame = activations.to_frame()
    frame = frame[frame.component == component].set_index("layer")
    levels = degradations(result)
    harm = np.log(levels).mean(axis=1).loc[frame.index]
    lines = []
    for name, (words, sign) in SIGNS.items():
        rank = float(stats.spearmanr(harm, frame[name]).statistic)
        place = int(frame[name].rank(ascending=sign < 0).loc[0])
        lines.append(
            goes_with(
                rank,
                len(frame),
                f"{words} with harm over {len(frame)} layers: Spearman's {ranked(rank, len(frame))}. Layer 0 stands at "
                f"place {place}, with {short(frame[name].loc[0])}.",
                sign,
            )
        )
    sinks = frame.index[frame.token_rank > SINK * frame.effective_rank]
    if len(sinks):
        lines.append(
            f"In layer {runs(sinks)} a few tokens of huge norm (attention sinks) are the covariance of the outputs: "
            f"its effective rank is {span(frame.effective_rank[sinks])}; {span(frame.token_rank[sinks])} with every "
            f"token weighed alike. Of the layers that more than double the perplexity, "
            f"{runs(doubled(levels) - set(sinks))} are none of these."
        )
    return bullets(*lines)


if __name__ == "__main__":
    typer.run(main)
