"""Progressive layer removal by criterion: the paper's Table 6 on any model.

    python experiments/01_progressive_removal/run.py [--model MODEL] [--text FILE]

Writes removal.json and perplexity.svg beside this file.
"""

from pathlib import Path
from typing import Annotated

import typer

import lyapunov_prune as lp
from experiments.common import Device, DType, load, read_text
from experiments.statements import table
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.pruning.curve import RemovalCurve, evaluate_removals
from lyapunov_prune.report.ranking import perplexity_figure

HERE = Path(__file__).parent
REMOVALS = (2, 4, 6, 8)  # of the paper


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: Annotated[str, typer.Option(help="builtin, or a file")] = "builtin",
    tokens: int = 4096,
    context: int = 512,
) -> None:
    loaded = load(model, device, dtype)
    calibration = read_text(loaded, text, tokens, context)
    evaluation = read_text(loaded, text, tokens, context, "evaluation")
    require_disjoint(calibration, evaluation)
    profile = lp.measure_contraction(loaded.model, calibration, seeds=range(2))
    influence = lp.block_influence(loaded.model, calibration)

    rankings = {
        "rho": lp.rank_layers(profile, criterion="rho"),
        "rho, token pooling": lp.rank_layers(profile.pooled("token"), criterion="rho"),
        "bi": lp.rank_layers(None, influence, criterion="bi"),
        "blend": lp.rank_layers(profile, influence, criterion="blend"),
        "from-end": lp.rank_layers(profile, criterion="from-end"),
        "random": lp.rank_layers(profile, criterion="random", seed=0),
    }
    plans = {name: [ranking.plan(count) for count in REMOVALS] for name, ranking in rankings.items()}
    curve = evaluate_removals(loaded.model, plans, evaluation)
    curve.save(HERE / "removal.json")
    (HERE / "perplexity.svg").write_text(perplexity_figure(curve), encoding="utf-8")
    print(curve)


def written() -> dict[str, str]:
    """Perplexity; a row a number of layers, a column a criterion."""
    curve = RemovalCurve.load(HERE / "removal.json")
    rows = {(row.criterion, len(row.removed)): row for row in curve.rows}
    criteria = list(dict.fromkeys(row.criterion for row in curve.rows[1:]))
    cells = [[n, *(rows[name, n].perplexity for name in criteria)] for n in sorted({n for _, n in rows} - {0})]
    return {"removal": table(["removed", *criteria], cells)}


if __name__ == "__main__":
    typer.run(main)
