"""Are degradation factors stable in the amount and the kind of text (Appendix D)?

    python experiments/1_contraction/stability/run.py [--model MODEL] --text A.txt --text B.jsonl

Perplexity over the first 4,096 to 51,200 tokens of each text, dense and compressed; calibration on the other half of
the first. Writes stability.json and stability.svg.
"""

from pathlib import Path

import numpy as np
import pandas as pd

import lyapunov_prune as lp
from experiments.common import Each, Model, draw, read_text, run_command
from experiments.statements import interval, short, table
from lyapunov_prune.evaluation.perplexity import interval_of
from lyapunov_prune.report.drawing import COLOURS, one_panel, svg
from lyapunov_prune.results.files import write_whole

HERE = Path(__file__).parent
CONTEXT, TOKENS = 512, (4096, 8192, 16384, 25600, 51200)


def main(model: Model = Model(), text: Each = None) -> None:
    folder = model.folder(HERE)
    names = text or ["builtin"]
    loaded = model.load()
    calibration = read_text(loaded, names[0], 4096, CONTEXT)
    small = lp.compress(loaded.model, calibration, method="wanda", sparsity=0.5)
    rows = []
    for name in names:
        batch = read_text(loaded, name, TOKENS[-1], CONTEXT, "evaluation")
        dense, pruned = (
            lp.perplexity(m, batch, description=Path(name).name).windows for m in (loaded.model, small.model)
        )
        for tokens in TOKENS:
            n = tokens // CONTEXT
            low, high = interval_of(pruned[:n] - dense[:n])
            rows.append(
                {
                    "text": Path(name).name,
                    "text_hash": batch.text_hash,
                    "tokens": tokens,
                    "dense": float(np.exp(dense[:n].mean())),
                    "compressed": float(np.exp(pruned[:n].mean())),
                    "degradation": float(np.exp((pruned[:n] - dense[:n]).mean())),
                    "low": low,
                    "high": high,
                }
            )
    frame = pd.DataFrame(rows)
    write_whole(folder / "stability.json", frame.to_json(orient="records", indent=1) + "\n")
    draw(folder, {"stability": figure(frame)})


def figure(frame: pd.DataFrame) -> str:
    page, axes = one_panel(6.5, 3.2)
    for (name, rows), colour in zip(frame.groupby("text", sort=False), (COLOURS["rho"], COLOURS["bi"]), strict=False):
        bars = np.abs(rows[["low", "high"]].to_numpy().T - rows.degradation.to_numpy())
        axes.errorbar(rows.tokens, rows.degradation, yerr=bars, marker="o", capsize=2, label=name, color=colour)
    axes.set_xlabel("tokens of evaluation text")
    axes.set_ylabel("perplexity / dense")
    axes.legend(frameon=False, fontsize=8)
    return svg(page)


def written(folder: Path = HERE) -> dict[str, str]:
    """Dense perplexity and degradation of each text by tokens."""
    frame = pd.read_json(folder / "stability.json")
    texts = list(dict.fromkeys(frame.text))
    by = frame.set_index(["text", "tokens"])
    cells = [
        [tokens, *(x for name in texts for x in _pair(by.loc[(name, tokens)]))]
        for tokens in dict.fromkeys(frame.tokens)
    ]
    head = [f"{name}, {what}" for name in texts for what in ("dense", "× dense")]
    factor, width = frame.groupby("text").degradation, 100 * (frame.high / frame.low - 1) / 2
    few, many = (width[frame.tokens == tokens].mean() for tokens in (TOKENS[0], TOKENS[-1]))
    return {
        "stability": table(["tokens", *head], cells),
        "moves": f"{short(100 * (factor.max() / factor.min() - 1).max())} %",
        "width, fewest tokens": f"{short(few)} %",
        "width, most tokens": f"{short(many)} %",
    }


def _pair(row: pd.Series) -> tuple[float, str]:
    return float(row.dense), interval(float(row.degradation), float(row.low), float(row.high))


if __name__ == "__main__":
    run_command(main, HERE / "stability.json", written)
