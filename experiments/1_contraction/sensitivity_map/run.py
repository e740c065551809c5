"""Which component of which layer can bear compression: the paper's Figure 2 and its two hierarchies (§6.1).

    python experiments/1_contraction/sensitivity_map/run.py [--model MODEL] [--text FILE]

Writes sensitivity.json and the figures beside this file.
"""

from pathlib import Path

from experiments.common import Model, draw, inputs, run_command
from experiments.statements import measured, ranked, short, signed, span, table
from lyapunov_prune.report.sensitivity import sensitivity_figures
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

HERE = Path(__file__).parent


def main(model: Model = Model(), text: str = "builtin", tokens: int = 1024, context: int = 256) -> None:
    folder = model.folder(HERE)
    result = inputs(model, text, tokens, context).sensitivity(
        ("group", "layer", "component", "sparsity", "rank", "removal")
    )
    result.save(folder / "sensitivity.json")
    draw(folder, sensitivity_figures(result))


def written(folder: Path = HERE) -> dict[str, str]:
    """Perplexity of each component and of some layers changed, and the rank correlations over layers."""
    found = Sensitivity.load(folder / "sensitivity.json")
    components = found.of("component").sort_values("perplexity")
    layers, removed = (found.of(study).set_index("layer").perplexity for study in ("layer", "removal"))
    shown = sorted(
        {*range(4), int(layers.idxmin()), *layers.nlargest(6).index, *removed.nlargest(6).index, len(layers) - 1}
    )
    correlations = found.correlations()
    ranks = correlations[correlations.measured == "regret, removal"].set_index("against").spearman
    groups, uniform, harm = found.of("group"), found.of("sparsity"), found.of("layer").set_index("layer").degradation
    first = groups[(groups.layer == 0) & groups.component.str.startswith("mlp")].degradation
    return {
        "setting": measured(found.measured_on, found.perplexity),
        "uniform": table(
            ["all layers, sparsity", "perplexity / dense"], zip(uniform.sparsity, uniform.degradation, strict=True)
        ),
        "best uniform rank": short(found.of("rank").degradation.min()),
        "one matrix of the MLP of layer 0": span(first),
        "median layer": short(harm.median()),
        "last layer": short(harm.iloc[-1]),
        "layer before it": short(harm.iloc[-2]),
        "regret with rho": ranked(ranks["|rho - 1|"], len(removed)),
        "regret with bi": ranked(ranks["bi"], len(removed)),
        "components": table(
            ["compressed in all layers", "perplexity"],
            [[row.label.rpartition(".")[2], float(row.perplexity)] for row in components.itertuples()],
        ),
        "layers": table(
            ["one layer", *map(str, shown)],
            [
                ["compressed", *(float(layers[k]) for k in shown)],
                ["removed", *(float(removed[k]) for k in shown)],
            ],
        ),
        "correlations": table(
            ["measured", "against", "Spearman", "p"],
            [[r.measured, r.against, signed(r.spearman), float(r.p)] for r in correlations.itertuples()],
        ),
    }


if __name__ == "__main__":
    run_command(main, HERE / "sensitivity.json", written)
