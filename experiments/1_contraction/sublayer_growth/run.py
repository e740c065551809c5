"""Which sublayer makes a layer contract or amplify: ρ of every attention and every MLP (§6.2, eq. 4).

    python experiments/1_contraction/sublayer_growth/run.py [--model MODEL] [--text FILE]

Writes MODEL.json beside this file; what all of them say goes into README.md by `make tables`.
"""

from pathlib import Path

import numpy as np

from experiments.common import Model, read_text, run_command
from experiments.statements import bullets, runs, short, table
from experiments.sublayer_growth import SublayerGrowth, sublayer_growth

HERE = Path(__file__).parent
SHOWN = 3  # layers of least and of most ρ


def main(model: Model = Model(), text: str = "builtin", tokens: int = 2048, context: int = 512) -> None:
    loaded = model.load()
    batch = read_text(loaded, text, tokens, context)
    found = sublayer_growth(loaded.model, batch, seeds=range(2))
    found.save(HERE / f"{found.measured_on.model.name}.json")


def written() -> dict[str, str]:
    results = [SublayerGrowth.load(path) for path in sorted(HERE.glob("*.json"), reverse=True)]
    return {
        "setting": bullets(*(f"{r.measured_on.line()}, ε = {r.epsilon:g}, {len(r.seeds)} seeds" for r in results)),
        "kinds": kinds(results),
        "layers": layers(results),
    }


def kinds(results: list[SublayerGrowth]) -> str:
    """Of each kind how many contract, the median and the most; of the layers that amplify, which sublayer does."""
    rows: list[list[object]] = []
    for r in results:
        attention, mlp = r.rho.T
        whole = attention * mlp
        amplifying = np.flatnonzero(whole > 1)
        for kind, rho in (("attention", attention), ("MLP", mlp)):
            more = int((rho[amplifying] > np.where(kind == "MLP", attention, mlp)[amplifying]).sum())
            most = int(rho.argmax())
            rows.append(
                [
                    r.measured_on.model.name,
                    kind,
                    f"{(rho < 1).sum()} of {len(rho)}",
                    float(np.median(rho)),
                    f"{short(float(rho[most]))} ({most})",
                    f"{more} of {len(amplifying)}",
                ]
            )
    head = ("model", "sublayer", "contract", "median ρ", "largest ρ (layer)", "layers that amplify, mostly by it")
    return table(head, rows)


def layers(results: list[SublayerGrowth]) -> str:
    """The layers of least and of most ρ, as the product of their sublayers' ρ."""
    rows: list[list[object]] = []
    for r in results:
        whole = r.rho.prod(1)
        order = np.argsort(whole)
        for layer in (*order[:SHOWN], *order[-SHOWN:]):
            parts = [
                f"{short(float(rho))} = {short(float(e))} / {short(float(h))}"
                for rho, e, h in zip(r.rho[layer], r.error_growth[layer], r.state_growth[layer], strict=True)
            ]
            rows.append([r.measured_on.model.name, runs([layer]), float(whole[layer]), *parts])
    return table(("model", "layer", "ρ", "attention: ρ = error / state", "MLP: ρ = error / state"), rows)


if __name__ == "__main__":
    run_command(main, HERE / "{model}.json", written)
