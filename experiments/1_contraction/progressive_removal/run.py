"""Progressive layer removal by criterion: the paper's Table 6 on any model.

    python experiments/1_contraction/progressive_removal/run.py [--model MODEL] [--text FILE …]

Writes contraction-TEXT.json, removal-TEXT.json and the figures beside this file, of each text alone. A greedy search by
the loss, which is how SLEB chooses, is measured by `removal_criteria` and shown beside them.
"""

import importlib
from pathlib import Path

import numpy as np

import lyapunov_prune as lp
from experiments.common import Each, Model, draw, plain, run_command, texts
from experiments.published import REMOVALS as PRINTED
from experiments.published import SEARCHED, SKIPPED
from experiments.removal_curve import RemovalCurve, evaluate_removals, perplexity_figure
from experiments.statements import short, table
from lyapunov_prune.profiles.contraction_profile import ContractionProfile, Pooling
from lyapunov_prune.report.profiles import contraction_figure

HERE = Path(__file__).parent
REMOVALS = (2, 4, 6, 8)  # of the paper
BUILTIN = "builtin"
BESIDE = ("rho", "bi", "oracle", "from-end")
TEXTS = importlib.import_module("experiments.2_criteria.three_texts.run")
SEARCH = Path(__file__).parents[2] / "2_criteria" / "removal_criteria" / "removal.json"
POOLINGS: tuple[Pooling, ...] = ("energy", "token")


def main(model: Model = Model(), text: Each = None, tokens: int = 4096, context: int = 512) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    for source in text or [BUILTIN]:
        calibration, evaluation = texts(loaded, source, calibration=tokens, evaluation=tokens, context=context)
        profile = lp.measure_contraction(loaded.model, calibration, seeds=range(2))
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
        name = Path(plain(source)).stem
        profile.save(folder / f"contraction-{name}.json")
        curve.save(folder / f"removal-{name}.json")
        figures = {"contraction": contraction_figure(profile), "perplexity": perplexity_figure(curve)}
        draw(folder, {f"{what}-{name}": figure for what, figure in figures.items()})


def written(folder: Path = HERE) -> dict[str, str]:
    """Of the built-in text by plain names, of another behind its own; `beside` has all texts and the paper's rows."""
    found = {path.stem.removeprefix("removal-"): path for path in sorted(folder.glob("removal-*.json"))}
    curves = {name: RemovalCurve.load(path) for name, path in found.items()}
    parts: dict[str, str] = {"beside": beside(curves)}
    for name, curve in curves.items():
        profile = ContractionProfile.load(folder / f"contraction-{name}.json")
        energy, token, share = sink(profile)
        own = {
            "setting": f"Scores: {profile.measured_on.line()}, {len(profile.seeds)} seeds.\nPerplexity: "
            f"{curve.measured_on.line()}; dense: {short(curve.dense.perplexity)}.\n",
            "dense": short(curve.dense.perplexity),
            "removal": removal(curve),
            "sink, energy pooling": short(energy),
            "sink, token pooling": short(token),
            "sink, share": f"{100 * share:.0f} %",
        }
        parts |= own if name == BUILTIN else {f"{name} {part}": value for part, value in own.items()}
    return parts


def beside(curves: dict[str, RemovalCurve]) -> str:
    """Perplexity over that of the dense model, ours on every text and in italics what the paper prints, its own and of
    the searches that it cites."""
    found: dict[tuple[int, str], dict[str, float]] = {}
    for name, curve in {**curves, "wiki.test, by wiki.valid": RemovalCurve.load(SEARCH)}.items():
        for row in curve.rows[1:]:
            found.setdefault((len(row.removed), name), {})[row.criterion] = row.degradation
    model = next(iter(curves.values())).measured_on.model
    for text in TEXTS.OnOneText.all(TEXTS.HERE):  # half of each to choose by, as here
        name = Path(text.measured_on.text).stem
        if text.measured_on.model.name == model.name and name not in curves:
            for chosen in text.chosen:
                ratio = float(np.exp((chosen.windows - text.dense).mean()))
                found.setdefault((len(chosen.removed), name), {})[chosen.criterion] = ratio
    rows: list[tuple[int, list[object]]] = []
    for (count, name), of in found.items():
        cells = [of.get(criterion) for criterion in BESIDE]
        rows.append((count, [count, f"{100 * count / model.num_layers:.0f} %", f"**{name}**", *cells]))
    dense = PRINTED["LLaMA-2-7B", "dense", 0][0]
    for count, printed in SKIPPED.items():
        cells = [f"*{short(printed[criterion] / dense)}*" for criterion in ("rho", "bi", "optimal", "from-end")]
        rows.append((count, [count, f"{100 * count / 32:.0f} %", "LLaMA-2-7B", *cells]))
    for name, (share, value) in SEARCHED.items():
        rows.append((9, [None, share, f"LLaMA-2-7B, {name}", None, None, f"*{short(value / dense)}*", None]))
    head = ["removed", "of the layers", "text or model", "rho", "bi", "search by the loss", "from-end"]
    return table(head, (row for _, row in sorted(rows, key=lambda pair: pair[0])))


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
    run_command(main, HERE / "removal-{text}.json", written)
