"""Multiple choice: what a compression does among the options that decide, and to the likeliest tokens.

    python experiments/4_hierarchy/candidates/run.py [--model MODEL] [--items FILE.jsonl]... [--text FILE]

Figure 8 of the paper. Without a file: its four multiple-choice prompts. Writes candidates.json and the figures beside
this file.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from scipy import stats
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, draw, read_text, run_command
from experiments.hierarchies import PROMPTS, as_json, cell, interval, kept, makers, opened, percent, records
from experiments.statements import short, span, table
from lyapunov_prune.data.choices import tokenize
from lyapunov_prune.predictions.spaces import log_softmax
from lyapunov_prune.progress import track
from lyapunov_prune.report.drawing import COLOURS, GREY, log_axis, one_panel, panels, svg
from lyapunov_prune.results.files import write_whole

HERE = Path(__file__).parent
MODELS = ("layers − 4", "attention − 8", "MLP − 8", "4 bits, a row", "8 bits, a row")
PAPERS = MODELS[1]
LETTERS = "ABCDEFGH"
GOLD = {"MC1": 2, "MC2": 1, "MC3": 2, "MC4": 2}
TOP = 10
FORMS = ("letters", "texts")


def main(
    model: Model = Model(),
    items: Annotated[list[Path] | None, typer.Option(help="JSONL of query, choices, gold; may be repeated.")] = None,
    limit: int = 30,
    text: str = "builtin",
    tokens: int = 2048,
) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    calibration = read_text(loaded, text, tokens, 512)
    sets = {("paper", "letters"): papers_items()}
    for path in items or ():
        found = lp.data.load_items(path)[:limit]
        if min(len(item.choices) for item in found) > 2:
            sets[path.stem, "letters"] = tuple(map(lettered, found))
        sets[path.stem, "texts"] = found
    lettered_items = [item for (_, form), found in sets.items() if form == "letters" for item in found]
    dense = decisions(loaded, loaded.model, lettered_items)
    rows, shifts, figures = [], [], {}
    ratios: dict[str, list[np.ndarray]] = {}
    lines: dict[str, str] = {}
    for name, make in makers(loaded, calibration).items():
        if name not in MODELS:
            continue
        small = cache(make)
        for (source, form), given in sets.items():
            measured = kept(
                model.name,
                f"choices-{name}-{source}-{form}-{len(given)}",
                lp.predictions.ChoiceComparison,
                calibration.measured_on(loaded.model),
                {"items": given, "model": name},
                lambda given=given, small=small: lp.predictions.compare_choices(
                    loaded.model, small(), given, loaded.tokenizer
                ),
            )
            lines[f"{source}, {form}"] = measured.measured_on.line()
            rows.append({"model": name, "items": source, "form": form, **outcome(measured)})
            ratios.setdefault(name, []).append(measured.moved / measured.radius)
        after = decisions(loaded, small(), lettered_items)
        shifts.append({"model": name, **shift(dense, after)})
        if name == PAPERS:
            figures["subspace"] = subspace_figure(dense, after)
    answers, moved = pd.DataFrame(rows), pd.DataFrame(shifts)
    facts = {
        "measured on": lines,
        "calibrated on": calibration.measured_on(loaded.model).line(),
        "violations of the certificate": int(answers.violations.sum()),
        "items proven": int(answers.certified.sum()),
        f"items with an option among the {TOP} likeliest tokens, dense, letters": share(among(dense)),
        "likeliest option of all items, dense, letters": dict(
            zip(LETTERS, np.bincount([int(p.options.argmax()) for p in dense], minlength=4).tolist(), strict=False)
        ),
    }
    write_whole(folder / "candidates.json", as_json({**facts, "choices": records(answers), "shifts": records(moved)}))
    draw(folder, {**figures, "survival": survival_figure(answers), "certificate": certificate_figure(ratios)})


def papers_items() -> tuple[lp.data.ChoiceItem, ...]:
    """Its prompts name their options A) to D) themselves."""
    return tuple(lp.data.ChoiceItem(f"{PROMPTS[k]}\nAnswer:", tuple(LETTERS[:4]), gold) for k, gold in GOLD.items())


def lettered(item: lp.data.ChoiceItem) -> lp.data.ChoiceItem:
    """The item with its choices listed in the query, one per line, and their letters as answers: one token decides."""
    letters = tuple(ascii_uppercase[: len(item.choices)])
    lines = [item.query.rstrip(), *(f"{a}. {text}" for a, text in zip(letters, item.choices, strict=True)), "Answer:"]
    return lp.data.ChoiceItem("\n".join(lines), letters, item.gold)


class Decision:
    """`log p` of the vocabulary where the answer is given, float64; its likeliest tokens, and the options."""

    def __init__(self, log_p: torch.Tensor, options: torch.Tensor) -> None:
        self.log_p = log_p
        self.options = log_p[options].cpu().numpy()
        self.likeliest = log_p.topk(TOP).indices
        self.named = options


@torch.no_grad()
def decisions(loaded: lp.models.Decoder, model: PreTrainedModel, items: Sequence[lp.data.ChoiceItem]) -> list[Decision]:
    found = []
    for item in track(items, "decisions"):
        ids, _, context = tokenize(item, loaded.tokenizer)
        z = model(ids[:1, :context].to(model.device)).logits[0, -1]
        found.append(Decision(log_softmax(z, 1.0).cpu(), ids[:, context]))
    return found


def outcome(measured: lp.predictions.ChoiceComparison) -> dict[str, float]:
    """Of one model and one set of items. Intervals of shares are Wilson's, 95 %."""
    n = len(measured.gold)
    same = int((measured.chosen("dense") == measured.chosen("compressed")).sum())
    ratio = measured.moved / measured.radius
    ratio = ratio[np.isfinite(ratio)]
    return {
        "n": n,
        "accuracy_dense": measured.accuracy("dense"),
        "accuracy": measured.accuracy("compressed"),
        **with_interval("same_choice", same, n),
        **with_interval("same_top", int(measured.same_top.sum()), n),
        "mass_dense": float(measured.dense_mass.mean()),
        "mass": float(measured.compressed_mass.mean()),
        "decided": int(np.isfinite(measured.moved).sum()),
        "certified": int(measured.certified.sum()),
        "changed": int((measured.changed > 0).sum()),
        "violations": len(measured.violations),
        "moved_by_radius_least": float(ratio.min()) if len(ratio) else np.nan,
        "moved_by_radius_median": float(np.median(ratio)) if len(ratio) else np.nan,
    }


def with_interval(name: str, count: int, n: int) -> dict[str, float]:
    low, high = stats.binomtest(count, n).proportion_ci(method="wilson")
    return {name: count / n, f"{name}_low": low, f"{name}_high": high}


def shift(before: list[Decision], after: list[Decision]) -> dict[str, float]:
    """How far probabilities move: of the dense model's likeliest tokens and of the options. Means over items.

    `centred`: less the mean over the options of the item, which changes no choice; `spread`: how far apart the dense
    model's options are, the same way.
    """
    columns: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        columns.setdefault(name, []).append(float(value))

    for p, q in zip(before, after, strict=True):
        top, top_after = p.log_p[p.likeliest].cpu().numpy(), q.log_p[p.likeliest].cpu().numpy()
        note("top_probability", np.abs(np.exp(top_after) - np.exp(top)).sum())
        note("top_log", np.abs(top_after - top).mean())
        note("options_probability", np.abs(np.exp(q.options) - np.exp(p.options)).sum())
        moved = q.options - p.options
        note("options_log", np.abs(moved).mean())
        note("options_log_centred", np.abs(moved - moved.mean()).mean())
        note("options_spread", np.abs(p.options - p.options.mean()).mean())
        note("options_correlation", np.corrcoef(p.options, q.options)[0, 1])
        note("same_option", p.options.argmax() == q.options.argmax())
        note("same_top_token", bool(p.likeliest[0] == q.likeliest[0]))
    found: dict[str, float] = {"n": len(before)}
    for name, values in columns.items():
        found |= dict(zip((name, f"{name}_low", f"{name}_high"), interval(np.array(values)), strict=True))
    return found


def among(found: list[Decision]) -> list[bool]:
    return [bool(torch.isin(p.named, p.likeliest).any()) for p in found]


def share(values: list[bool]) -> str:
    return f"{sum(values)} of {len(values)}"


def subspace_figure(before: list[Decision], after: list[Decision]) -> str:
    """Figure 8: log-probabilities of the dense model's likeliest tokens, and of the options, before and after."""
    figure, column = panels(5.6, 8.2, 2)
    pairs: list[tuple[Axes, str, str, list[tuple[np.ndarray, np.ndarray]]]] = [
        (
            column[0],
            f"the {TOP} likeliest tokens",
            COLOURS["bi"],
            [
                (p.log_p[p.likeliest].cpu().numpy(), q.log_p[p.likeliest].cpu().numpy())
                for p, q in zip(before, after, strict=True)
            ],
        ),
        (
            column[1],
            "the options",
            COLOURS["rho"],
            [(p.options, q.options) for p, q in zip(before, after, strict=True)],
        ),
    ]
    low = min(min(x.min(), y.min()) for *_, found in pairs for x, y in found) - 0.5
    for axes, name, colour, found in pairs:
        x, y = (np.concatenate(part) for part in zip(*found, strict=True))
        axes.plot(x, y, "o", markersize=2.5, alpha=0.4, color=colour, label=f"{name} of {len(found)} items")
        axes.plot([low, 0], [low, 0], color=GREY, linewidth=0.8, label="unchanged")
        axes.set_ylim(low, 0.4)
        axes.set_ylabel("log-probability, nats, eight attentions left out")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    column[1].set_xlim(low, 0.4)
    column[1].set_xlabel("log-probability, nats, dense model")
    return svg(figure)


def survival_figure(answers: pd.DataFrame) -> str:
    """How often the choice and the likeliest token stay the same; the two forms of the items below each other."""
    forms = [form for form in FORMS if (answers.form == form).any()]
    figure, column = panels(6.5, 1 + 2.2 * len(forms), len(forms))
    for axes, form in zip(column, forms, strict=True):
        part = answers[answers.form == form]
        names = list(dict.fromkeys(part.model))
        for k, (share_, label, colour, marker) in enumerate(
            (
                ("same_choice", "the choice", COLOURS["rho"], "o"),
                ("same_top", "the likeliest token", COLOURS["bi"], "s"),
            )
        ):
            counts = (part[share_] * part.n).groupby(part.model).sum()
            n = part.groupby("model").n.sum()
            for y, name in enumerate(names):
                row = with_interval("of", round(counts[name]), int(n[name]))
                bars = 100 * np.abs(np.array([[row["of_low"]], [row["of_high"]]]) - row["of"])
                axes.errorbar(
                    100 * row["of"],
                    y + 0.2 * (k - 0.5),
                    xerr=bars,
                    fmt=marker,
                    markersize=4,
                    capsize=2,
                    color=colour,
                    label=label if y == 0 else None,
                )
        proven = part.groupby("model").certified.sum() / part.groupby("model").decided.sum()
        for y, name in enumerate(names):
            axes.plot(100 * proven[name], y + 0.3, "|", markersize=8, color=COLOURS["blend"])
        axes.plot([], [], "|", markersize=8, color=COLOURS["blend"], label="first token proven to stay")
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(-3, 103)
        answered = "by letters" if form == "letters" else "by their texts"
        axes.set_ylabel(f"answered {answered}\nn = {int(part.groupby('model').n.sum().iloc[0])}")
    column[0].legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    column[-1].set_xlabel("items in which it stays the same, %")
    return svg(figure)


def certificate_figure(ratios: dict[str, list[np.ndarray]]) -> str:
    """How far the state moved of how far it may: the theorem proves the option's token to the left of 1."""
    figure, axes = one_panel(8.2, 3.2)
    colours = [COLOURS[k] for k in ("bi", "from-end", "rho, token pooling", "rho", "blend", "random")]
    for (name, found), colour in zip(ratios.items(), colours, strict=False):
        each = np.concatenate(found)
        ratio = np.sort(each[np.isfinite(each)])
        shares = 100 * np.arange(1, len(ratio) + 1) / len(ratio)
        axes.step(ratio, shares, where="post", linewidth=1.2, color=colour, label=name)
    axes.axvline(1, color=GREY, linewidth=0.8)
    log_axis(axes, "x")
    axes.set_ylim(-3, 103)
    axes.set_xlabel("how far the state moved / radius within which the option is proven to stay")
    axes.set_ylabel("items, %")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return svg(figure)


def written(folder: Path = HERE) -> dict[str, str]:
    found = opened(folder / "candidates.json")
    return {
        "setting": setting(found),
        "survival": survival(found),
        "shifts": shifts(found),
        "certificate": certificate(found),
        **numbers(found),
    }


def setting(found: dict[str, Any]) -> str:
    lines = [f"- {items}: {line}\n" for items, line in found["measured on"].items()]
    return "".join(lines) + f"- removal by Block Influence: {found['calibrated on']}\n"


def pooled(answers: pd.DataFrame, model: str, form: str) -> dict[str, Any]:
    """Of all sets of items answered in one form: how often choice and likeliest token stay, what is proven."""
    part = answers[(answers.model == model) & (answers.form == form)]
    n = int(part.n.sum())
    row: dict[str, Any] = {"n": n, "certified": int(part.certified.sum()), "decided": int(part.decided.sum())}
    for name in ("same_choice", "same_top"):
        row |= with_interval(name, round(float((part[name] * part.n).sum())), n)
    return row


def survival(found: dict[str, Any]) -> str:
    answers, rows = found["choices"], []
    for model in MODELS:
        forms = [pooled(answers, model, form) for form in FORMS]
        shares = [cell(row, name, percent) for row in forms for name in ("same_choice", "same_top")]
        proven = f"{sum(row['certified'] for row in forms)} of {sum(row['decided'] for row in forms)}"
        rows.append([model, *shares, proven])
    header = [f"{form}: {what}" for form in FORMS for what in ("choice", "likeliest token")]
    return table(["stays the same, %, by", *header, "proven"], rows)


def shifts(found: dict[str, Any]) -> str:
    moved = found["shifts"]
    header = [f"Σ|Δp|, the {TOP} likeliest tokens", "Σ|Δp|, options", f"mean |Δ log p|, the {TOP} likeliest, nats"]
    names = ("top_log", "options_log", "options_log_centred")
    rows = [
        [row.model, row.top_probability, row.options_probability, *(cell(row, name) for name in names)]
        for _, row in moved.iterrows()
    ]
    first = moved.iloc[0]
    header = [f"by letters, means over {first.n} items", *header, "options", "options, less their common shift"]
    spread = cell(first, "options_spread")
    return f"{table(header, rows)}\nThe options themselves lie {spread} nats from their mean in the dense model.\n"


def certificate(found: dict[str, Any]) -> str:
    """How many choices are proven to stay; how far the state moves of how far it may, medians of the sets of items."""
    rows = []
    for model in MODELS:
        part = found["choices"][found["choices"].model == model].dropna(subset=["moved_by_radius_median"])
        proven = f"{part.certified.sum()} of {part.decided.sum()}"
        rows.append([model, proven, int(part.violations.sum()), span(part.moved_by_radius_median)])
    return table(["", "proven to stay", "violations", "state moved / radius"], rows)


def numbers(found: dict[str, Any]) -> dict[str, str]:
    """By letters: the option that the dense model takes most, and its accuracy on ARC-Easy."""
    answers, taken = found["choices"], found["likeliest option of all items, dense, letters"]
    letter = max(taken, key=taken.get)
    arc = answers[(answers["items"] == "arc_easy") & (answers.form == "letters")].accuracy_dense.iloc[0]
    return {
        "taken": f"{letter} in {taken[letter]} of {sum(taken.values())}",
        "arc": short(100 * arc),
        "among": found[f"items with an option among the {TOP} likeliest tokens, dense, letters"],
    }


if __name__ == "__main__":
    run_command(main, HERE / "candidates.json", written)
