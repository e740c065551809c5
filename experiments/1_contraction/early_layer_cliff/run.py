"""The cliff behind the first layers, at five levels, and what goes with it: Figure 3 and Table 2 (§6.1, §6.3).

    python experiments/1_contraction/early_layer_cliff/run.py [--model MODEL] [--text FILE]

Writes cliff.json, activations.json and the figures beside this file. `make tables` writes the tables
and numbers of the chapter's page from them.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from experiments.activations import ActivationStatistics, activation_figure, activation_statistics
from experiments.common import Model, draw, inputs, run_command
from experiments.statements import percent, ranked, runs, short, span, table
from lyapunov_prune.report.sensitivity import cliff_figure, levels_figure
from lyapunov_prune.sensitivity import Sensitivity

HERE = Path(__file__).parent
SIGNS = {  # what the paper associates with the early-layer catastrophe (§6.1)
    "effective_rank": "effective rank of the outputs",
    "kurtosis": "kurtosis of the inputs",
    "sparsity": "sparsity of the inputs",
}


def main(model: Model = Model(), text: str = "builtin", tokens: int = 1024, context: int = 256) -> None:
    folder = model.folder(HERE)
    given = inputs(model, text, tokens, context)
    result = given.sensitivity(("layer0", "cliff", "threshold"))
    result.save(folder / "cliff.json")
    activations = activation_statistics(given.loaded.model, given.calibration)
    activations.save(folder / "activations.json")
    draw(
        folder,
        {
            "cliff": cliff_figure(result),
            "levels": levels_figure(result),
            "activations": activation_figure(activations),
        },
    )


def written(folder: Path = HERE) -> dict[str, str]:
    result = Sensitivity.load(folder / "cliff.json")
    activations = ActivationStatistics.load(folder / "activations.json")
    levels, star = degradations(result), result.of("threshold")
    drops = (levels / levels.shift(-1)).iloc[:-1]
    return {
        "setting": setting(result),
        "cliff": cliff_table(result),
        "drop": span(drops.max()),
        "drop after layer 2": span(drops.loc[2]),
        "layer 0, rank 16": span(result.of("layer0").degradation),
        "threshold": table(["layer 0, Wanda", *(f"{100 * s:g} %" for s in star.sparsity)], [["regret", *star.regret]]),
        "star": "none" if result.threshold is None else percent(result.threshold),
        "signs": signs(result, activations),
    }


def signs(result: Sensitivity, activations: ActivationStatistics) -> str:
    """What the paper associates with the cliff against harm, the mean logarithm of the degradation over the levels."""
    frame = activations.to_frame()
    frame = frame[frame.component == result.of("cliff").component[0]].set_index("layer")
    harm = np.log(degradations(result)).mean(axis=1).loc[frame.index]
    rows = [
        [words, ranked(float(stats.spearmanr(harm, frame[name]).statistic), len(frame)), frame[name].loc[0]]
        for name, words in SIGNS.items()
    ]
    return table(["with harm, over layers", "Spearman", "at layer 0"], rows)


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


def doubled(levels: pd.DataFrame) -> set[int]:
    """The layers that more than double the perplexity at one level or more."""
    return set(levels.index[(levels > 2).any(axis=1)])


if __name__ == "__main__":
    run_command(main, HERE / "cliff.json", written)
