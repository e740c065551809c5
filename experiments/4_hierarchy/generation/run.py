"""Dense and compressed models write from the same prompts, each from its own tokens.

    python experiments/4_hierarchy/generation/run.py [--model MODEL] [--text FILE]

Figures 7 and 12 and Table 2 of the paper. Writes generation.json and the figures beside this file.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from scipy import stats
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments import statements
from experiments.common import Model, draw, run_command, texts
from experiments.hierarchies import (
    AWQ,
    as_json,
    cell,
    encoded,
    interval,
    kept,
    makers,
    measured_on,
    opened,
    percent,
    records,
    summarise,
)
from experiments.statements import ranked, short, table
from lyapunov_prune.data.batch import checked_batch
from lyapunov_prune.evaluation.repetition import collapsed, repetition
from lyapunov_prune.forward.decoding import walk
from lyapunov_prune.forward.reading import read
from lyapunov_prune.linalg import lift
from lyapunov_prune.predictions.spaces import divergences, log_softmax, turn
from lyapunov_prune.report.drawing import COLOURS, GREY, INK, log_axis, one_panel, panels, svg
from lyapunov_prune.results.files import write_whole

HERE = Path(__file__).parent
PAPERS = "attention − 8"  # Drop-8A, the pruned model of its Figure 7
# Of Figure 12: what is drawn, and how.
DRAWN = {
    PAPERS: (COLOURS["bi"], "o"),
    "Wanda 50 %": (COLOURS["rho"], "s"),
    "4 bits, a row": (COLOURS["blend"], "^"),
    "4 bits, groups of 64": (COLOURS["from-end"], "D"),
    AWQ: (COLOURS["rho, token pooling"], "v"),
}
SPACES = {"state": COLOURS["blend"], "logits": COLOURS["rho"], "probabilities": COLOURS["bi"]}
MEASURES = (*SPACES, "kl")
OTHER = "another prompt"
SHOWN = ("attention − 4", PAPERS, "MLP − 4", "MLP − 8", "layers − 8", "Wanda 50 %", "4 bits, a row")


def main(model: Model = Model(), text: str = "builtin", tokens: int = 2048, steps: int = 32) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    prompts = {k: ids for k, ids in encoded(loaded).items() if not k.startswith("MC")}
    calibration, evaluation = texts(loaded, text, calibration=tokens, evaluation=tokens, context=512)

    made_on, scored_on = (batch.measured_on(loaded.model) for batch in (calibration, evaluation))

    def score(name: str, measured: Callable[[], PreTrainedModel]) -> lp.evaluation.Perplexity:
        file, asked = f"perplexity-{evaluation.text_hash[:16]}-{name}", {"model": name, "made on": made_on}
        return kept(
            model.name, file, lp.evaluation.Perplexity, scored_on, asked, lambda: lp.perplexity(measured(), evaluation)
        )

    dense = score("dense", lambda: loaded.model)
    frames, rows = [unrelated(loaded, prompts, steps)], []
    answers: dict[str, dict[str, str]] = {}
    for name, make in makers(loaded, calibration).items():
        small = cache(make)
        found = {
            k: kept(
                model.name,
                f"generation-{name}-{k}-{steps}",
                lp.predictions.GenerationDivergence,
                checked_batch(loaded.structure, ids).measured_on(loaded.model),
                {"steps": steps, "model": name, "made on": made_on},
                lambda ids=ids, small=small: lp.compare_generation(loaded.model, small(), ids, steps=steps),
            )
            for k, ids in prompts.items()
        }
        frame = together(name, found)
        own = score(name, small)
        _, low, high = own.ratio_to(dense)
        ratio = {"perplexity": own.value, "ratio": own.value / dense.value, "ratio_low": low, "ratio_high": high}
        rows.append({"model": name, **ratio, **outcome(found, steps), **spans(frame)})
        frames.append(frame)
        for which, written_by in (("dense", "dense_tokens"), (name, "compressed_tokens")):
            answers[which] = {k: str(loaded.tokenizer.decode(getattr(f, written_by)[0])) for k, f in found.items()}
    models, frame = pd.DataFrame(rows), pd.concat(frames)
    by_step = summarise(frame, "prompt", ("model", "step"), MEASURES)
    other = summarise(frames[0], "prompt", ("model",), MEASURES)
    order = {k: stats.spearmanr(models[k], models.first_difference, nan_policy="omit") for k in ("ratio", "kl_before")}
    facts = {
        "measured on": measured_on(loaded, prompts).line(),
        "calibrated on": calibration.measured_on(loaded.model).line(),
        "perplexity on": evaluation.measured_on(loaded.model).line(),
        "prompts": len(prompts),
        "steps": steps,
        "dense perplexity": float(f"{dense.value:.6g}"),
        "dense texts ended": sum(len(f.dense_tokens[0]) < steps for f in found.values()),
        "dense texts collapsed": sum(collapsed(f.dense_tokens[0]) for f in found.values()),
        "dense 3-grams repeated": three(np.array([repetition(f.dense_tokens[0], 3) for f in found.values()])),
        **{
            f"rank correlation of the first difference with {k}, over models": [float(f"{x:.3g}") for x in both]
            for k, both in order.items()
        },
    }
    texts_ = [{"prompt": k, **{name: each[k] for name, each in answers.items()}} for k in prompts]
    tables = {"models": records(models), OTHER: records(other), "steps": records(by_step), "texts": texts_}
    write_whole(folder / "generation.json", as_json({**facts, **tables}))
    draw(
        folder,
        {
            "attention": paper_figure(by_step, other),
            "methods": methods_figure(by_step),
            "parting": parting_figure(models, steps),
        },
    )


def together(name: str, found: dict[str, lp.predictions.GenerationDivergence]) -> pd.DataFrame:
    """A row a prompt and step; `parted`: the texts that the two models have read by then differ."""
    return pd.concat(
        [
            f.to_frame().assign(model=name, prompt=k, parted=np.arange(len(f.kl)) > f.first_difference[0])
            for k, f in found.items()
        ]
    )


def outcome(found: dict[str, lp.predictions.GenerationDivergence], steps: int) -> dict[str, object]:
    """How long the texts agree, and what becomes of them."""
    first = [f.first_difference[0] for f in found.values()]
    made = [f.compressed_tokens[0] for f in found.values()]
    repeated = three(np.array([repetition(tokens, 3) for tokens in made]))
    return {
        "first_differences": first,
        "first_difference": float(np.median(first)),
        "same_to_the_end": sum(f == steps for f in first),
        "ended": sum(len(tokens) < steps for tokens in made),
        "collapsed": sum(map(collapsed, made)),
        **dict(zip(("repeated", "repeated_low", "repeated_high"), repeated, strict=True)),
    }


def spans(frame: pd.DataFrame) -> dict[str, float]:
    """Means at the first step, then while both have read the same text, and after; each prompt counts once."""
    found: dict[str, float] = {}
    for when, rows in (
        ("first", frame[frame.step == 0]),
        ("before", frame[(frame.step > 0) & ~frame.parted]),
        ("after", frame[frame.parted]),
    ):
        rows = rows.dropna(subset=["kl"])
        found[f"prompts_{when}"] = rows.prompt.nunique()
        row = summarise(rows, "prompt", ("model",), MEASURES).iloc[0] if len(rows) else {}
        found |= {f"{m}_{when}{end}": row.get(f"{m}{end}", np.nan) for m in MEASURES for end in ("", "_low", "_high")}
    return found


@torch.no_grad()
def unrelated(loaded: lp.models.Decoder, prompts: dict[str, torch.Tensor], steps: int) -> pd.DataFrame:
    """The dense model at the same step of the next prompt's text: what the measures say where nothing is related."""
    walks = {}
    for k, ids in prompts.items():
        states, logits, _ = zip(*walk(read(loaded, ids), ids, steps, told=True), strict=True)
        walks[k] = torch.cat(states), torch.cat(logits)
    names, frames = list(walks), []
    for k, after in zip(names, [*names[1:], names[0]], strict=True):
        (h, z), (h2, z2) = walks[k], walks[after]
        log_p, log_q = log_softmax(z, 1.0), log_softmax(z2, 1.0)
        turned = [turn(a, b)[0] for a, b in ((h, h2), (lift(z), lift(z2)), (log_p.exp(), log_q.exp()))]
        values = [*(1 - x for x in turned), divergences(log_p, log_q)[1]]
        columns = dict(zip(MEASURES, (x.cpu().numpy() for x in values), strict=True))
        frames.append(pd.DataFrame({"model": OTHER, "prompt": k, "step": range(steps), **columns}))
    return pd.concat(frames)


def three(values: np.ndarray) -> list[float]:
    return [float(f"{x:.4g}") for x in interval(values)]


def band(axes: Axes, part: pd.DataFrame, column: str, colour: str, marker: str, label: str) -> None:
    axes.plot(part.step, part[column], f"-{marker}", markersize=3, linewidth=0.9, color=colour, label=label)
    low, high = part[f"{column}_low"], part[f"{column}_high"]
    axes.fill_between(part.step, low, high, color=colour, alpha=0.15, linewidth=0)


def paper_figure(by_step: pd.DataFrame, other: pd.DataFrame) -> str:
    """Figure 7: cosine similarity in the three spaces, and KL, over steps."""
    figure, (similarity, divergence) = panels(9, 5.8, 2)
    part = by_step[by_step.model == PAPERS]
    for (space, colour), marker in zip(SPACES.items(), "os^", strict=True):
        band(similarity, part, space, colour, marker, space)
        similarity.axhline(other[space].iloc[0], color=colour, linewidth=0.9, linestyle=":")
    similarity.plot([], [], ":", color=GREY, label="dense model on another prompt")
    similarity.set_ylim(top=1.03)
    similarity.set_ylabel("cosine similarity")
    band(divergence, part, "kl", INK, "o", "")
    divergence.axhline(other.kl.iloc[0], color=INK, linewidth=0.9, linestyle=":")
    log_axis(divergence)
    divergence.set_ylabel("KL(p‖q), nats")
    similarity.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    divergence.set_xlabel("decoding step, eight attentions left out")
    divergence.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    return svg(figure)


def methods_figure(by_step: pd.DataFrame) -> str:
    """Figure 12: the same for pruning, sparsity and rounding."""
    figure, column = panels(9, 9, 4)
    for axes, measure in zip(column, MEASURES, strict=True):
        for name, (colour, marker) in DRAWN.items():
            band(axes, by_step[by_step.model == name], measure, colour, marker, name)
        axes.set_ylabel("KL(p‖q), nats" if measure == "kl" else f"cosine, {measure}")
    log_axis(column[-1])
    column[0].legend(frameon=False, fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    column[-1].set_xlabel("decoding step")
    column[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    return svg(figure)


def parting_figure(models: pd.DataFrame, steps: int) -> str:
    """The first step at which the texts differ, a point a prompt."""
    figure, axes = one_panel(6.5, 3.4)
    for y, row in enumerate(models.itertuples()):
        first = np.sort(row.first_differences)
        stacked = np.array([(first[:i] == x).sum() for i, x in enumerate(first)])
        axes.plot(first, y - 0.09 * stacked, "o", markersize=4, alpha=0.6, color=COLOURS["rho"])
        axes.plot([row.first_difference] * 2, [y - 0.4, y + 0.25], color=INK, linewidth=1.4)
    axes.axvline(steps, color=GREY, linewidth=0.8, linestyle=":")
    axes.plot([], [], "o", markersize=4, alpha=0.6, color=COLOURS["rho"], label="a prompt")
    axes.plot([], [], color=INK, linewidth=1.4, label="median")
    axes.plot([], [], ":", color=GREY, label="never within the steps")
    axes.set_yticks(range(len(models)), models.model, fontsize=8)
    axes.set_ylim(len(models) - 0.4, -0.8)
    axes.set_xlim(-1, steps + 1)
    axes.set_xlabel("first decoding step at which the texts differ")
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return svg(figure)


def written(folder: Path = HERE) -> dict[str, str]:
    found = opened(folder / "generation.json")
    return {
        "setting": setting(found),
        "outcomes": outcomes(found),
        "similarity": similarity(found),
        "texts": texts_of(found),
        **numbers(found),
    }


def setting(found: dict[str, Any]) -> str:
    return (
        f"{found['measured on']}.\nRemoval, Wanda and SparseGPT: {found['calibrated on']}.\nPerplexity: "
        f"{found['perplexity on']}; dense: {short(found['dense perplexity'])}.\n"
    )


def outcomes(found: dict[str, Any]) -> str:
    """What became of the texts, a row a model."""
    dense = [percent(x) for x in found["dense 3-grams repeated"]]
    rows: list[list[object]] = [
        [
            "dense",
            1,
            None,
            None,
            statements.interval(*dense),
            found["dense texts collapsed"],
            found["dense texts ended"],
        ]
    ]
    rows += [
        [
            row.model,
            row.ratio,
            row.first_difference,
            cell(row, "kl_first"),
            cell(row, "repeated", percent),
            row.collapsed,
            row.ended,
        ]
        for _, row in found["models"].iterrows()
    ]
    header = ["", "perplexity / dense", "first difference, median step", "KL at the first step, nats"]
    return table([*header, "3-grams repeated, %", f"collapsed, of {found['prompts']}", "ended"], rows)


def similarity(found: dict[str, Any]) -> str:
    """Of the paper's pruned model: cosines in the three spaces and KL, before and after the texts part."""
    own, other = of_papers(found), found[OTHER].iloc[0]
    rows = [
        [words, *(cell(own, f"{m}_{when}") for m in MEASURES)]
        for words, when in (("first step", "first"), ("after the texts have parted", "after"))
    ]
    rows.append(["dense model, the text of another prompt", *(cell(other, m) for m in MEASURES)])
    return table([f"cosine similarity, {PAPERS}", *SPACES, "KL, nats"], rows)


def of_papers(found: dict[str, Any]) -> pd.Series:
    return found["models"].set_index("model").loc[PAPERS]


def texts_of(found: dict[str, Any]) -> str:
    """What the models write on the prompt of the paper's Table 2."""
    row = found["texts"].set_index("prompt").loc["Math2"]
    return table(["", "text"], [[name, re.sub(r"\s+", " ", row[name]).strip()] for name in ("dense", *SHOWN)])


def numbers(found: dict[str, Any]) -> dict[str, str]:
    """`jumps` and `upset` are of the steps at which both models have read the same text, after the first.

    A model whose texts all part at the first step has none.
    """
    models = found["models"].dropna(subset=["kl_before"])
    of = len(models)
    order = found["rank correlation of the first difference with ratio, over models"][0]
    return {
        "order": ranked(order, len(found["models"])),
        "jumps": f"{(models.kl_before < models.kl_first).sum()} of {of}",
        "upset": f"{(models.logits_before < models.probabilities_before).sum()} of {of}",
    }


if __name__ == "__main__":
    run_command(main, HERE / "generation.json", written)
