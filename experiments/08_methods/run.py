"""Compression methods on common ground: the same calibration, the same layers, the same evaluation (§6.4).

    python experiments/08_methods/run.py [MODEL] [--text FILE]

Writes methods.json and methods.svg beside this file.
"""

from pathlib import Path

import typer

import lyapunov_prune as lp
from experiments.common import draw, texts
from experiments.compressions import Setting, compressions_figure, evaluate_compressions

HERE = Path(__file__).parent
SETTINGS = [
    *(Setting(method, sparsity=0.5) for method in ("magnitude", "weight-only", "wanda", "sparsegpt")),
    *(Setting(method, sparsity=0.5, pattern=(2, 4), label=f"{method} 2:4") for method in ("wanda", "sparsegpt")),
    *(Setting(method, sparsity=0.2) for method in ("svd", "whitened-svd", "balanced")),
    *(Setting("rtn", bits=bits) for bits in (8, 4, 3)),
    Setting("rtn", bits=4, group_size=64, label="rtn, groups of 64"),
]


def main(model: str = "smollm2-135m", text: str = "builtin") -> None:
    loaded = lp.load(model)
    calibration, evaluation = texts(loaded, text, calibration=4096, evaluation=4096, context=512)
    table = evaluate_compressions(loaded.model, SETTINGS, calibration, evaluation)
    table.save(HERE / "methods.json")
    draw(HERE, {"methods": compressions_figure(table)})
    print(table)


if __name__ == "__main__":
    typer.run(main)
