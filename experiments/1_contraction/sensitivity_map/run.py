"""Which component of which layer can bear compression: the paper's Figure 2 and its two hierarchies (§6.1).

    python experiments/1_contraction/sensitivity_map/run.py [--model MODEL] [--text FILE]

Writes sensitivity.json and the figures beside this file.
"""

from pathlib import Path

import typer

from experiments.common import Device, DType, draw, inputs, of_model
from experiments.statements import (
    bullets,
    correlation,
    goes_with,
    measured,
    ranked,
    short,
    signed,
    span,
    table,
    verdict,
)
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
    folder = of_model(HERE, model)
    result = inputs(model, text, tokens, context, device=device, dtype=dtype).sensitivity(
        ("group", "layer", "component", "sparsity", "rank", "removal")
    )
    result.save(folder / "sensitivity.json")
    draw(folder, sensitivity_figures(result))
    print(result)


def written(folder: Path = HERE) -> dict[str, str]:
    """Perplexity of each component and of some layers changed, and the rank correlations over layers."""
    found = Sensitivity.load(folder / "sensitivity.json")
    components = found.of("component").sort_values("perplexity")
    layers, removed = (found.of(study).set_index("layer").perplexity for study in ("layer", "removal"))
    shown = sorted(
        {*range(4), int(layers.idxmin()), *layers.nlargest(6).index, *removed.nlargest(6).index, len(layers) - 1}
    )
    correlations = found.correlations()
    return {
        "setting": measured(found.measured_on, found.perplexity),
        "summary": summary(found),
        "verdict": against_the_paper(found),
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


def regret_of_removal(found: Sensitivity) -> dict[str, tuple[float, float]]:
    """Spearman's correlation of the regret of removing a layer, and its p, by what it is held against."""
    rows = found.correlations()
    rows = rows[rows.measured == "regret, removal"]
    return {r.against: (float(r.spearman), float(r.p)) for r in rows.itertuples()}


def summary(found: Sensitivity) -> str:
    ranks = regret_of_removal(found)
    return (
        f"Over the {len(found.of('removal'))} layers the regret of removing one follows |ρ − 1| with Spearman "
        f"{correlation(*ranks['|rho - 1|'])} and Block Influence with {correlation(*ranks['bi'])}.\n"
    )


def against_the_paper(found: Sensitivity) -> str:
    rank, layers = found.of("rank"), found.of("layer").set_index("layer").degradation
    uniform = ", ".join(f"{short(r.degradation)} at {r.sparsity:.0%}" for r in found.of("sparsity").itertuples())
    groups = found.of("group")
    first = groups[(groups.layer == 0) & groups.component.str.startswith("mlp")].degradation
    types = found.of("component").sort_values("perplexity", ascending=False)
    order = [label.rpartition(".")[2] for label in types.label]
    ranks, middle = regret_of_removal(found), float(layers.median())
    count, rho = len(found.of("removal")), ranks["|rho - 1|"][0]
    mlp = all(c.startswith("mlp") for c in types.component[:3])
    return bullets(
        verdict(
            rank.degradation.min() > 100,
            f"uniform rank fails at every level: {short(rank.degradation.min())} × dense at best. "
            f"Uniform sparsity: {uniform}.",
        ),
        verdict(
            first.min() > 10 * middle,
            f"the MLP of layer 0 is catastrophic: each of its {len(first)} matrices alone multiplies the "
            f"perplexity by {span(first)}, the layer in the middle of the order as a whole by {short(middle)}.",
        ),
        verdict(mlp, f"MLP inputs and outputs are the most sensitive types: from most to least {', '.join(order)}."),
        verdict(
            order[-1] == "v_proj",
            f"V is the least sensitive type on GPT-2, here number {order.index('v_proj') + 1} of {len(order)}.",
        ),
        goes_with(
            rho,
            count,
            f"|ρ − 1| predicts the regret of removing a layer: {ranked(rho, count)} (Block Influence: "
            f"{ranked(ranks['bi'][0], count)}).",
        ),
        verdict(
            layers.iloc[-1] < 2 * middle,
            f"the last layers are not sensitive on GPT-2; here the last multiplies the perplexity by "
            f"{short(layers.iloc[-1])}, the one before by {short(layers.iloc[-2])}.",
        ),
    )


if __name__ == "__main__":
    typer.run(main)
