"""Compression methods on common ground: the same calibration, the same layers, the same evaluation (§6.4).

    python experiments/3_compression/methods/run.py [--model MODEL] [--text FILE] [--unseen FILE]

Of a dithered model (MODEL-dithered-SEED) roundings alone are compared.
Writes methods.json and methods.svg beside this file.
"""

from dataclasses import replace
from pathlib import Path

from experiments.common import DITHERED, Model, Other, draw, run_command, texts
from experiments.compressions import (
    CompressionTable,
    Setting,
    against,
    beside,
    compressions_figure,
    evaluate_compressions,
)
from experiments.statements import interval, short, table

HERE = Path(__file__).parent
AMOUNTS = {"sparsity": "{:.0%} removed", "bits": "{:g} bits"}
ROUNDED = [
    *(Setting("rtn", bits=bits) for bits in (8, 4, 3)),
    *(
        Setting(method, bits=bits, group_size=64, label=f"{method}, groups of 64")
        for bits in (4, 3)
        for method in ("rtn", "awq", "gptq")
    ),
]
SETTINGS = [
    *(Setting(method, sparsity=0.5) for method in ("magnitude", "weight-only", "wanda", "sparsegpt")),
    *(Setting(method, sparsity=0.5, pattern=(2, 4), label=f"{method} 2:4") for method in ("wanda", "sparsegpt")),
    *(Setting(method, sparsity=0.2) for method in ("svd", "whitened-svd", "balanced")),
    *ROUNDED,
]


def main(model: Model = Model(), text: str = "builtin", unseen: Other = None, tokens: int = 4096) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    batches = texts(loaded, text, calibration=tokens, evaluation=tokens, context=512, unseen=unseen)
    settings = ROUNDED if DITHERED in model.name else SETTINGS
    table = evaluate_compressions(loaded.model, settings, *batches, path=folder / "methods.json")
    table.save(folder / "methods.json")
    of_one_kind = tuple(row for row in table.rows if row.unit == "sparsity") or table.rows
    draw(folder, {"methods": compressions_figure(replace(table, rows=of_one_kind))})


def written(folder: Path = HERE) -> dict[str, str]:
    """Perplexity of every method, and its ratio to the dense model with a 95 % interval paired by window.

    Roundings have a table of their own, with the ratio to `rtn` in the same groups where windows were kept.
    """
    found = CompressionTable.load(folder / "methods.json")
    rows, dense = found.rows, short(found.rows[0].perplexity / found.rows[0].degradation)
    by = {(r.method, r.amount): r for r in rows}
    cells: dict[str, list[list[object]]] = {"sparsity": [], "bits": []}
    for r in rows:
        shown = [r.method, AMOUNTS[r.unit].format(r.amount), r.perplexity, interval(r.degradation, r.low, r.high)]
        nearest = by.get(("rtn" + "".join(r.method.partition(", ")[1:]), r.amount))
        kept = nearest and nearest != r and nearest.windows and r.windows
        cells[r.unit].append([*shown, beside(r, nearest) if kept and nearest else None])
    pair = [by[name, 0.5] for name in ("sparsegpt", "wanda") if (name, 0.5) in by and by[name, 0.5].windows]
    head = ["method", "amount", "perplexity", "× dense"]
    return {
        "dense": dense,
        "setting": f"Every matrix of all layers. Perplexity: {found.measured_on.line()}; dense: {dense}.\n",
        "methods": table(head, [row[:4] for row in cells["sparsity"]]),
        "roundings": table([*head, "/ rtn"], cells["bits"]),
        **({"sparsegpt / wanda": interval(*against(*pair))} if len(pair) == 2 else {}),
    }


if __name__ == "__main__":
    run_command(main, HERE / "methods.json", written)
