"""Compression methods on common ground: the same calibration, the same layers, the same evaluation (§6.4).

    python experiments/08_methods/run.py [--model MODEL] [--text FILE]

Writes methods.json and methods.svg beside this file.
"""

from pathlib import Path

import typer

from experiments.common import Device, DType, draw, load, texts
from experiments.compressions import CompressionTable, Setting, compressions_figure, evaluate_compressions
from experiments.statements import interval, table

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
    loaded = load(model, device, dtype)
    calibration, evaluation = texts(loaded, text, calibration=tokens, evaluation=tokens, context=512)
    table = evaluate_compressions(loaded.model, SETTINGS, calibration, evaluation)
    table.save(HERE / "methods.json")
    draw(HERE, {"methods": compressions_figure(table)})
    print(table)


def written() -> dict[str, str]:
    """Perplexity of every method, and its ratio to the dense model with a 95 % interval paired by window."""
    rows = CompressionTable.load(HERE / "methods.json").rows
    cells = [
        [r.method, AMOUNTS[r.unit].format(r.amount), r.perplexity, interval(r.degradation, r.low, r.high)] for r in rows
    ]
    return {"methods": table(["method", "amount", "perplexity", "× dense"], cells)}


if __name__ == "__main__":
    typer.run(main)
