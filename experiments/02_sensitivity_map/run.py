"""Which component of which layer can bear compression: the paper's Figure 2 and its two hierarchies (§6.1).

    python experiments/02_sensitivity_map/run.py [--model MODEL] [--text FILE]

Writes sensitivity.json and the figures beside this file.
"""

from pathlib import Path

import typer

from experiments.common import Device, DType, draw, inputs
from experiments.statements import table
from lyapunov_prune.report.sensitivity import sensitivity_figures
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
    result = inputs(model, text, tokens, context, device=device, dtype=dtype).sensitivity(
        ("group", "layer", "component", "sparsity", "rank", "removal")
    )
    result.save(HERE / "sensitivity.json")
    draw(HERE, sensitivity_figures(result))
    print(result)


def written() -> dict[str, str]:
    """Perplexity of each component and of some layers changed, and the rank correlations over layers."""
    found = Sensitivity.load(HERE / "sensitivity.json")
    components = found.of("component").sort_values("perplexity")
    layers, removed = (found.of(study).set_index("layer").perplexity for study in ("layer", "removal"))
    shown = sorted(
        {*range(4), int(layers.idxmin()), *layers.nlargest(6).index, *removed.nlargest(6).index, len(layers) - 1}
    )
    correlations = found.correlations()
    return {
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
            [[r.measured, r.against, f"{r.spearman:+.2f}", float(r.p)] for r in correlations.itertuples()],
        ),
    }


if __name__ == "__main__":
    typer.run(main)
