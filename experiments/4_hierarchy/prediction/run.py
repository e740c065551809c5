"""Which score, known before anything is generated, tells what a removal does to perplexity and to generation?
(Representation hierarchies, §5: its estimate as a predictor, which the paper does not try.)

    python experiments/4_hierarchy/prediction/run.py [--model MODEL] [--text FILE]

Every layer removed alone, and sets of two to eight layers chosen by each criterion and at random. For each set the sum
of the scores of its layers, perplexity on held-out text, and greedy decoding from held-out prompts beside the dense
model's. Writes prediction.json, correlation.json, sets.svg and correlation.svg; interrupted, it goes on.
"""

import importlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

import lyapunov_prune as lp
from experiments.amplification import weighted_spearman
from experiments.common import Model, draw, run_command, texts
from experiments.statements import interval, percent, signed, table
from lyapunov_prune.evaluation.repetition import collapsed, repetition
from lyapunov_prune.progress import track
from lyapunov_prune.report.drawing import COLOURS, log_axis, one_panel, svg
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.store import Store

HERE = Path(__file__).parent
COUNTS, RANDOM = (2, 3, 4, 6, 8), 3
PROMPTS, PROMPT, STEPS = 8, 32, 32
SCORES = ("kl", "bi", "rho", "blend")
DIGITS = 8  # means of the same shares in another order differ in their last bits, and are ties
WHAT = {"log_ratio": "log perplexity ratio", "parted": "first difference, negated", "repetition": "3-grams repeated"}
DRAWS = 500
# The two estimates as chapter 2 has scored single layers, on WikiText: by Theorem 3 and by Theorem 2 of the paper.
ELSEWHERE = HERE.parents[1] / "2_criteria" / "removal_criteria"
VARIANCES = {"kl": "variance", "cosine": "variance_r"}
EDGES = (0.0, 0.3, 0.6, 1.0, 2.0, np.inf)  # of the predicted divergence, nats a token


def main(model: Model = Model(), text: str = "builtin", tokens: int = 4096) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    calibration, held_out = texts(loaded, text, calibration=tokens // 2, evaluation=tokens, context=512)
    scoring = lp.TokenBatch(held_out.ids[:4], text=held_out.text, split=held_out.split, bos=held_out.bos)
    # Prompts lie behind what perplexity is measured on.
    prompts = held_out.ids[4:].reshape(-1, PROMPT)[:: held_out.ids[4:].numel() // PROMPT // PROMPTS][:PROMPTS]
    profile = lp.measure_contraction(loaded.model, calibration, seeds=range(2))
    influence = lp.block_influence(loaded.model, calibration)
    rankings = {
        "kl": lp.ranking.rank_by_divergence(lp.predictions.skip_divergence(loaded.model, calibration)),
        "bi": lp.rank_layers(None, influence, criterion="bi"),
        "rho": lp.rank_layers(profile, criterion="rho"),
        "blend": lp.rank_layers(profile, influence, criterion="blend-minmax"),
    }
    about = {"calibration": encode(calibration.measured_on(loaded.model)), "prompts": f"{PROMPTS} × {PROMPT} + {STEPS}"}
    kept = model.jobs / f"prediction-{calibration.text_hash[:16]}"
    jobs = Store(kept, "prediction", {**about, "held out": held_out.text_hash})
    dense = lp.perplexity(loaded.model, scoring)
    chosen = sets(rankings, loaded.structure.num_layers)
    for removed in track(list(chosen), "sets of layers"):
        key = ",".join(map(str, removed))
        if key in jobs:
            continue
        small = lp.remove_layers(loaded.model, removed)
        found = lp.compare_generation(loaded.model, small, prompts, steps=STEPS)
        jobs.add(
            key,
            {
                "log_ratio": lp.perplexity(small, scoring).nll - dense.nll,
                "first_difference": float(np.mean(found.first_difference)),
                "repetition": float(np.mean([repetition(t, 3) for t in found.compressed_tokens])),
                "collapsed": float(np.mean([collapsed(t) for t in found.compressed_tokens])),
                "dense_repetition": float(np.mean([repetition(t, 3) for t in found.dense_tokens])),
            },
        )
    rows = [
        {"removed": list(removed), "by": by}
        | {name: float(r.scores[list(removed)].sum()) for name, r in rankings.items()}
        | jobs[",".join(map(str, removed))]
        for removed, by in chosen.items()
    ]
    frame = pd.DataFrame(rows)
    frame["parted"] = -frame.first_difference
    content = {"measured_on": encode(scoring.measured_on(loaded.model)), **about, "sets": frame.to_dict("records")}
    write_whole(folder / "prediction.json", pd.Series(content).to_json(indent=1, force_ascii=False) + "\n")
    ranks = correlations(frame)
    ranked = {"measured_on": content["measured_on"], "rows": ranks.to_dict("records")}
    write_whole(folder / "correlation.json", pd.Series(ranked).to_json(indent=1, force_ascii=False) + "\n")
    draw(folder, {"sets": sets_figure(frame), "correlation": correlation_figure(ranks)})


def sets(rankings: dict[str, lp.ranking.LayerRanking], layers: int) -> dict[tuple[int, ...], str]:
    """Every layer alone, the first of every ranking, and random ones, each with the first that chose it."""
    found: dict[tuple[int, ...], str] = {(layer,): "alone" for layer in range(layers)}
    for name, ranking in rankings.items():
        for count in COUNTS:
            found.setdefault(ranking.plan(count).remove, name)
    random = np.random.default_rng(0)
    for count in COUNTS:
        for _ in range(RANDOM):
            found.setdefault(tuple(sorted(random.choice(layers, count, replace=False).tolist())), "random")
    return found


def correlations(frame: pd.DataFrame, scores: Iterable[str] = SCORES) -> pd.DataFrame:
    """Spearman of every score with every measure, with the 95 % interval of a bootstrap over the sets."""
    rows = []
    for kind, part in (("one layer", frame[frame.by == "alone"]), ("two to eight", frame[frame.by != "alone"])):
        draws = np.random.default_rng(0).integers(len(part), size=(DRAWS, len(part)))
        counts = np.apply_along_axis(np.bincount, 1, draws, minlength=len(part))
        for score in scores:
            for measure in WHAT:
                x, y = part[score].to_numpy(), part[measure].round(DIGITS).to_numpy()
                low, high = np.nanquantile(weighted_spearman(x, y, counts), [0.025, 0.975])
                value = stats.spearmanr(x, y).statistic
                rows.append((kind, len(part), score, measure, value, low, high))
    return pd.DataFrame(rows, columns=["removed", "sets", "score", "measure", "spearman", "low", "high"])


def sets_figure(frame: pd.DataFrame) -> str:
    figure, axes = one_panel(6.5, 4.0)
    colours = {
        "alone": "#444444",
        **{name: COLOURS.get(name, "#CC79A7") for name in SCORES},
        "random": COLOURS["random"],
    }
    for by, part in frame.groupby("by", sort=False):
        axes.scatter(
            part.kl, np.exp(part.log_ratio), s=14, color=colours[by], label="one layer" if by == "alone" else by
        )
    log_axis(axes, "x")
    log_axis(axes)
    axes.set_xlabel("sum of Var(Δz) / 2T² of the layers, each measured alone, nats a token")
    axes.set_ylabel("perplexity / dense, held out")
    axes.legend(frameon=False, fontsize=8, title="chosen by", title_fontsize=8)
    return svg(figure)


def correlation_figure(correlations: pd.DataFrame) -> str:
    figure, axes = one_panel(6.5, 3.6)
    groups = [(kind, measure) for kind in correlations.removed.unique() for measure in WHAT]
    for i, score in enumerate(SCORES):
        own = correlations[correlations.score == score].set_index(["removed", "measure"])
        rows = [own.loc[group] for group in groups]
        y = np.array([r.spearman for r in rows])
        bars = np.abs(np.array([[r.low, r.high] for r in rows]).T - y)
        x = np.arange(len(groups)) + 0.16 * (i - 1.5)
        axes.errorbar(
            x, y, yerr=bars, fmt="o", markersize=4, capsize=2, color=COLOURS.get(score, "#CC79A7"), label=score
        )
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.set_ylim(-1.05, 1.05)
    axes.set_xticks(range(len(groups)), [f"{WHAT[m]}\n({k})".replace(", ", ",\n") for k, m in groups], fontsize=7)
    axes.set_ylabel("Spearman over sets of layers")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower left")
    return svg(figure)


def written(folder: Path = HERE) -> dict[str, str]:
    ranked = json.loads((folder / "correlation.json").read_text(encoding="utf-8"))
    frame = pd.DataFrame(ranked["rows"]).set_index(["measure", "removed", "score"])
    content = json.loads((folder / "prediction.json").read_text(encoding="utf-8"))
    sets = pd.DataFrame(content["sets"])
    return {
        "setting": setting(content, sets),
        "correlations": spearman_table(frame),
        "within": within_table(sets),
        **scored_elsewhere(folder, sets),
        "expected": expected(sets),
        "foretold": foretold(),
        **numbers(frame, sets),
    }


def foretold() -> str:
    """How often the lines of `expected.py` are right about sets that they have not seen."""
    known = importlib.import_module("experiments.4_hierarchy.prediction.expected").found()
    rows = []
    for name, what in (("perplexity", "log perplexity ratio"), ("first_difference", "steps until the texts part")):
        line = known[name]
        fitted = (signed(line[key]) for key in ("intercept", "slope", "width"))
        unseen = ", ".join(f"{m} {percent(each[name])}" for m, each in known["unseen_model"].items()) or "—"
        rows.append([what, known["fitted"], *fitted, known["held_out"], percent(line["covered"]), unseen])
    inside = ("held out", "of these inside", "sets inside, of a model not fitted")
    return table(["of", "sets fitted", "intercept", "slope", "half width", *inside], rows)


def setting(content: dict[str, Any], sets: pd.DataFrame) -> str:
    on, seen = (decode(MeasuredOn, content[name]) for name in ("measured_on", "calibration"))
    alone = (sets.by == "alone").sum()
    return (
        f"{len(sets)} sets of layers: each of the {alone} alone, and {len(sets) - alone} of two to eight, chosen by "
        f"each criterion and at random.\nScores: {seen.line()}.\nPerplexity: {on.line()}.\nGreedy tokens: "
        f"{content['prompts']} (prompts × tokens + tokens written) behind those.\n"
    )


def scored_elsewhere(folder: Path, sets: pd.DataFrame) -> dict[str, str]:
    """Both variances of the paper, scored on another text, with what became of the sets on this one."""
    path = ELSEWHERE / folder.relative_to(HERE) / "divergence.json"
    if not path.exists():
        return {}
    known = lp.predictions.SkipDivergence.load(path)
    sums = {s: [getattr(known, name)[each].sum() for each in sets.removed] for s, name in VARIANCES.items()}
    frame = correlations(sets.assign(**sums), VARIANCES).set_index(["measure", "removed", "score"])
    return {"variances": spearman_table(frame, VARIANCES)}


def spearman_table(frame: pd.DataFrame, scores: Iterable[str] = SCORES) -> str:
    """Spearman of every score with every measure, over sets, with its 95 % interval."""
    groups = dict.fromkeys((measure, removed) for measure, removed, _ in frame.index)
    rows = [
        [f"{WHAT[measure]}, {removed}", *(_correlation(frame.loc[(measure, removed, score)]) for score in scores)]
        for measure, removed in groups
    ]
    return table(["Spearman with", *scores], rows)


def within_sizes(sets: pd.DataFrame) -> pd.DataFrame:
    """Spearman of every score with the log perplexity ratio among sets of one size, a row a size; none below four sets.

    Over sets of all sizes a score is right already when more layers cost more; within a size it is not.
    """
    more = sets[sets.by != "alone"]
    rows = {
        size: {"sets": len(part), **{s: stats.spearmanr(part[s], part.log_ratio).statistic for s in SCORES}}
        for size, part in more.groupby(more.removed.map(len))
        if len(part) >= 4
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def within_table(sets: pd.DataFrame) -> str:
    found = within_sizes(sets)
    rows = [[f"{size} layers", int(row.sets), *(signed(row[s]) for s in SCORES)] for size, row in found.iterrows()]
    middle = [signed(found[s].median()) for s in SCORES]
    return table(["Spearman with log perplexity ratio, sets of", "sets", *SCORES], [*rows, ["median", "", *middle]])


def expected(sets: pd.DataFrame) -> str:
    """What became of the sets whose predicted divergence lies in a range: medians, and means of the shares."""
    rows = []
    for low, high in itertools.pairwise(EDGES):
        part = sets[(sets.kl >= low) & (sets.kl < high)]
        ratio = np.exp(part.log_ratio)
        rows.append(
            [
                f"{low:g} to {high:g}" if high < np.inf else f"{low:g} or more",
                len(part),
                interval(ratio.median(), ratio.min(), ratio.max()),
                part.first_difference.median(),
                100 * part.repetition.median(),
                100 * part.collapsed.mean(),
            ]
        )
    head = ["predicted, nats a token", "sets", "perplexity ratio, lowest to highest", "steps until the texts part"]
    return table([*head, "3-grams repeated, %", "texts collapsed, %"], rows)


def numbers(frame: pd.DataFrame, sets: pd.DataFrame) -> dict[str, str]:
    """Spearman of the estimate with perplexity: single layers, sets of two to eight, both, and sets of one size."""
    one, more = (frame.loc[("log_ratio", removed, "kl")] for removed in ("one layer", "two to eight"))
    within = within_sizes(sets).kl
    return {
        "sets": str(len(sets)),
        "sets of two to eight": str((sets.by != "alone").sum()),
        "one": _correlation(one),
        "more": _correlation(more),
        "all": f"{stats.spearmanr(sets.kl, sets.log_ratio).statistic:+.3f}",
        "within-median": signed(within.median()),
        "within-least": signed(within.min()),
    }


def _correlation(row: pd.Series) -> str:
    return f"{signed(row.spearman)} ({signed(row.low)} to {signed(row.high)})"


if __name__ == "__main__":
    run_command(main, HERE / "prediction.json", written)
