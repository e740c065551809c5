"""Do the later values of ρ say how far a compressed component moves the last state (§6.6: Spearman −0.44)?

    python experiments/4_hierarchy/drift/run.py [--model MODEL] [--text FILE]

Every component of every layer is compressed alone, lightly and at the paper's setting. Writes light.json and heavy.json
beside this file. What they say goes into README.md by `make tables`.
"""

from pathlib import Path

import numpy as np

from experiments.amplification import PAPER, AmplificationDrift, amplification_drift
from experiments.common import RANK, SPARSITY, Model, inputs, run_command
from experiments.statements import bullets, signed, stated, table

HERE = Path(__file__).parent
SETTINGS: dict[str, tuple[float, int | None]] = {"light": (0.5, None), "heavy": (SPARSITY, RANK)}


def main(model: Model = Model(), text: str = "builtin", tokens: int = 1024, context: int = 256) -> None:
    folder = model.folder(HERE)
    given = inputs(model, text, tokens, context)
    contraction = given.profile().contraction
    for name, (sparsity, rank) in SETTINGS.items():
        found = given.sensitivity(("group",), sparsity=sparsity, rank=rank)
        amplification_drift(found, contraction).save(folder / f"{name}.json")


def measured(folder: Path = HERE) -> dict[str, AmplificationDrift]:
    """The settings whose result lies in the folder."""
    paths = {name: folder / f"{name}.json" for name in SETTINGS}
    return {name: AmplificationDrift.load(path) for name, path in paths.items() if path.exists()}


def of_all_models() -> list[tuple[str, AmplificationDrift]]:
    """The settings of the built-in model and of every other that was measured, with their names."""
    folders = (HERE, *sorted(path for path in HERE.iterdir() if path.is_dir()))
    return [pair for folder in folders for pair in measured(folder).items()]


def written(folder: Path = HERE) -> dict[str, str]:
    results = measured(folder)
    return {"setting": setting(results), "correlations": correlations(results), "first": first(results)}


def setting(results: dict[str, AmplificationDrift]) -> str:
    return bullets(
        *(
            f"{name}: {result.compression}; drift on {result.measured_on.line()}; ρ on {result.profiled_on.line()}"
            for name, result in results.items()
        )
    )


def correlations(results: dict[str, AmplificationDrift]) -> str:
    header = ("compression", "drift with", "pooling", "Spearman", "95 % by layer", "p by layer", "p by group", "groups")
    rows = [
        (name, symbol, pooling, signed(rs), f"{signed(low)} to {signed(high)}", float(p), float(p_groups), groups)
        for name, result in results.items()
        for symbol, pooling, rs, low, high, p, p_groups, groups, _ in result.to_frame().itertuples(index=False)
    ]
    return table(header, rows)


def first(results: dict[str, AmplificationDrift]) -> str:
    """Mean drift from a component of layer 0, and from one of the others."""
    rows = []
    for name, result in results.items():
        of = np.array(result.layers) == 0
        rows.append([name, float(result.drift[of].mean()), float(result.drift[~of].mean())])
    return table(["mean drift of a component", "layer 0", "other layers"], rows)


def beside_the_paper(said: str, spearman: float, low: float, high: float) -> str:
    """Of drift with A. The paper says not whether its drift is CKA, and so not which sign: none can agree outright."""
    within = [signed(value) for value in (PAPER, -PAPER) if low <= value <= high]
    outcome = (
        f"the interval holds {' and '.join(within)}"
        if within
        else "of the former the same sign, and another size"
        if high < 0
        else "neither lies in the interval"
    )
    return stated(
        f"{said}{signed(spearman)}, {signed(low)} to {signed(high)} by layer (the paper: {signed(PAPER)} if its drift "
        f"is 1 − CKA as here, {signed(-PAPER)} in these terms if it is CKA): {outcome}.",
        "Not decided" if within else "Differs",
    )


if __name__ == "__main__":
    run_command(main, HERE / "heavy.json", written)
