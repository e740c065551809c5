"""Progressive layer removal by criterion: the paper's Table 6 on any model.

    python experiments/1_contraction/progressive_removal/run.py [--model MODEL] [--text FILE]

Writes contraction.json, removal.json and the figures beside this file.
"""

from pathlib import Path
from typing import Annotated

import typer

import lyapunov_prune as lp
from experiments.common import Model, draw, read_text, run_command
from experiments.statements import short, table
from lyapunov_prune.data.batch import require_disjoint
from lyapunov_prune.profiles.contraction_profile import ContractionProfile, Pooling
from lyapunov_prune.pruning.curve import RemovalCurve, evaluate_removals
from lyapunov_prune.report.profiles import contraction_figure
from lyapunov_prune.report.ranking import perplexity_figure

HERE = Path(__file__).parent
REMOVALS = (2, 4, 6, 8)  # of the paper
POOLINGS: tuple[Pooling, ...] = ("energy", "token")


def main(
    model: Model = Model(),
    text: Annotated[str, typer.Option(help="builtin, or a file")] = "builtin",
    tokens: int = 4096,
    context: int = 512,
) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    calibration = read_text(loaded, text, tokens, context)
    evaluation = read_text(loaded, text, tokens, context, "evaluation")
    require_disjoint(calibration, evaluation)
    profile = lp.measure_contraction(loaded.model, calibration, seeds=range(2))
    profile.save(folder / "contraction.json")
    influence = lp.block_influence(loaded.model, calibration)

    rankings = {
        "rho": lp.rank_layers(profile, criterion="rho"),
        "rho, token pooling": lp.rank_layers(profile.pooled("token"), criterion="rho"),
        "bi": lp.rank_layers(None, influence, criterion="bi"),
        "blend": lp.rank_layers(profile, influence, criterion="blend-minmax"),
        "from-end": lp.rank_layers(profile, criterion="from-end"),
        "random": lp.rank_layers(profile, criterion="random", seed=0),
    }
    plans = {name: [ranking.plan(count) for count in REMOVALS] for name, ranking in rankings.items()}
    curve = evaluate_removals(loaded.model, plans, evaluation)
    curve.save(folder / "removal.json")
    draw(folder, {"contraction": contraction_figure(profile), "perplexity": perplexity_figure(curve)})


def written(folder: Path = HERE) -> dict[str, str]:
    profile = ContractionProfile.load(folder / "contraction.json")
    curve = RemovalCurve.load(folder / "removal.json")
    energy, token, share = sink(profile)
    return {
        "setting": f"Scores: {profile.measured_on.line()}, {len(profile.seeds)} seeds.\nPerplexity: "
        f"{curve.measured_on.line()}; dense: {short(curve.dense.perplexity)}.\n",
        "dense": short(curve.dense.perplexity),
        "removal": removal(curve),
        "sink, energy pooling": short(energy),
        "sink, token pooling": short(token),
        "sink, share": f"{100 * share:.0f} %",
    }


def by_count(curve: RemovalCurve) -> dict[int, dict[str, float]]:
    """Perplexity by number of layers removed and criterion."""
    found: dict[int, dict[str, float]] = {}
    for row in curve.rows[1:]:
        found.setdefault(len(row.removed), {})[row.criterion] = row.perplexity
    return dict(sorted(found.items()))


def removal(curve: RemovalCurve) -> str:
    """Perplexity; a row a number of layers, a column a criterion."""
    rows = by_count(curve)
    criteria = list(dict.fromkeys(name for row in rows.values() for name in row))
    return table(["removed", *criteria], [[n, *(row[name] for name in criteria)] for n, row in rows.items()])


def sink(profile: ContractionProfile) -> tuple[float, float, float]:
    """Of the layer after which one token holds the largest share of the energy: ρ by energy and by token, the share."""
    layer = int(profile.sink_state_share[1:].argmax())
    layer = max(profile.pooling_disagrees, key=lambda k: profile.sink_state_share[k + 1], default=layer)
    energy, token = (profile.pooled(pooling).rho[layer] for pooling in POOLINGS)
    return float(energy), float(token), float(profile.sink_state_share[layer + 1])


if __name__ == "__main__":
    run_command(main, HERE / "removal.json", written)
