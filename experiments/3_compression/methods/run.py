"""Compression methods on common ground: the same calibration, the same layers, the same evaluation (§6.4).

    python experiments/3_compression/methods/run.py [--model MODEL] [--text FILE]

Writes methods.json and methods.svg beside this file.
"""

from pathlib import Path

import typer

from experiments.common import Device, DType, draw, load, of_model, texts
from experiments.compressions import (
    ALIKE,
    CompressionRow,
    CompressionTable,
    Setting,
    against,
    apart,
    compressions_figure,
    evaluate_compressions,
    told,
)
from experiments.statements import bullets, decided, interval, short, table

HERE = Path(__file__).parent
AMOUNTS = {"sparsity": "{:.0%} removed", "bits": "{:g} bits"}
SETTINGS = [
    *(Setting(method, sparsity=0.5) for method in ("magnitude", "weight-only", "wanda", "sparsegpt")),
    *(Setting(method, sparsity=0.5, pattern=(2, 4), label=f"{method} 2:4") for method in ("wanda", "sparsegpt")),
    *(Setting(method, sparsity=0.2) for method in ("svd", "whitened-svd", "balanced")),
    *(Setting("rtn", bits=bits) for bits in (8, 4, 3)),
    Setting("rtn", bits=4, group_size=64, label="rtn, groups of 64"),
]


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 4096,
) -> None:
    folder = of_model(HERE, model)
    loaded = load(model, device, dtype)
    calibration, evaluation = texts(loaded, text, calibration=tokens, evaluation=tokens, context=512)
    table = evaluate_compressions(loaded.model, SETTINGS, calibration, evaluation)
    table.save(folder / "methods.json")
    draw(folder, {"methods": compressions_figure(table)})
    print(table)


def written(folder: Path = HERE) -> dict[str, str]:
    """Perplexity of every method, and its ratio to the dense model with a 95 % interval paired by window."""
    found = CompressionTable.load(folder / "methods.json")
    rows, dense = found.rows, short(found.rows[0].perplexity / found.rows[0].degradation)
    cells = [
        [r.method, AMOUNTS[r.unit].format(r.amount), r.perplexity, interval(r.degradation, r.low, r.high)] for r in rows
    ]
    return {
        "dense": dense,
        "setting": f"Every matrix of all layers. Perplexity: {found.measured_on.line()}; dense: {dense}.\n",
        "methods": table(["method", "amount", "perplexity", "× dense"], cells),
        "verdict": against_the_papers({r.method: r for r in rows}),
    }


def against_the_papers(rows: dict[str, CompressionRow]) -> str:
    """Of methods told from each other, paired by window where windows were kept."""
    paired = all(row.windows for row in rows.values())

    def word(one: str, other: str) -> str:
        return (told if paired else apart)(rows[one], rows[other])

    def wins(one: tuple[str, ...], other: tuple[str, ...], statement: str) -> str:
        words = {word(a, b) for a in one for b in other}
        return decided(words == {"better"}, "worse" in words, statement)

    def beside(one: str, other: str) -> str:
        if paired:
            return f"{interval(*against(rows[one], rows[other]))} of its perplexity, paired by window"
        lie = "overlap" if word(one, other) == ALIKE else "lie apart"
        return f"their intervals {lie}, and to pair them the losses of windows were not kept"

    aware, naive = ("sparsegpt", "wanda"), ("magnitude", "weight-only")
    ratio = {name: short(row.degradation) for name, row in rows.items()}
    return bullets(
        wins(
            aware,
            naive,
            f"methods that look at activations win: {' and '.join(ratio[a] for a in aware)} × dense "
            f"({' and '.join(aware)}) against {' and '.join(ratio[n] for n in naive)} ({' and '.join(naive)}; the "
            "paper: 34.6 against 406.7 for naive sparsification of GPT-2 at 50 %).",
        ),
        wins(
            ("sparsegpt",),
            ("wanda",),
            f"SparseGPT beats Wanda: {ratio['sparsegpt']} × dense against {ratio['wanda']}; "
            f"{beside('sparsegpt', 'wanda')}.",
        ),
        wins(
            ("balanced",),
            ("svd",),
            f"balanced truncation does better than a plain SVD, {ratio['balanced']} against {ratio['svd']} × dense; "
            f"whitened by the inputs it is {ratio['whitened-svd']}.",
        ),
        f"The simplified score against plain magnitude here: {word('weight-only', 'magnitude')}.",
    )


if __name__ == "__main__":
    typer.run(main)
