"""Layers removed, weights pruned, and both: perplexity and speed side by side (§6.5, Table 5).

    python experiments/3_compression/depth_and_sparsity/run.py [--model MODEL] [--text FILE]

Writes depth.json beside this file.
"""

from pathlib import Path

import typer

import lyapunov_prune as lp
from experiments.common import Device, DType, load, of_model, texts
from experiments.compressions import against, judged, told
from experiments.statements import bullets, decided, interval, short, span, stated, table, verdict
from lyapunov_prune.evaluation.evaluation import Evaluation, zero_share
from lyapunov_prune.evaluation.perplexity import interval_of

HERE = Path(__file__).parent
REMOVED, SPARSITY = 4, 0.5
TOLERANCE = 0.1  # losses multiply where the product is within this of what is measured


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 4096,
) -> None:
    folder = of_model(HERE, model)
    loaded = load(model, device, dtype)
    calibration, evaluation = texts(loaded, text, calibration=tokens // 2, evaluation=tokens, context=512)
    influence = lp.block_influence(loaded.model, calibration)
    profile = lp.measure_contraction(loaded.model, calibration, seeds=range(2))
    plans = {
        "bi": lp.rank_layers(None, influence, criterion="bi").plan(REMOVED),
        "rho": lp.rank_layers(profile, criterion="rho").plan(REMOVED),
    }
    models = {"dense": loaded.model}
    models |= {f"{name} -{REMOVED}": lp.remove_layers(loaded.model, plan) for name, plan in plans.items()}
    for name in ("dense", *list(models)[1:]):
        for schedule in ("uniform", "atp"):
            small = lp.compress(models[name], calibration, method="wanda", sparsity=SPARSITY, allocation=schedule)
            models[f"{name}, wanda {schedule} {SPARSITY:g}"] = small.model
    for name, one in models.items():
        one.config._name_or_path = name
    result = Evaluation(
        perplexities=tuple(lp.perplexity(m, evaluation, description=name) for name, m in models.items()),
        zeros=tuple(zero_share(m) for m in models.values()),
        speed=lp.measure_speed(models, prompt=128, steps=32, repeats=5),
    )
    result.save(folder / "depth.json")
    print(result, result.speed, sep="\n\n")


def written(folder: Path = HERE) -> dict[str, str]:
    """Perplexity and speed beside the dense model's, and the speed that the parameters left would allow."""
    result = Evaluation.load(folder / "depth.json")
    assert result.speed is not None
    dense, first = result.perplexities[0], result.speed.rows[0]
    cells = [
        [
            speed.model,
            one.value,
            interval(one.value / dense.value, *one.ratio_interval(dense)),
            f"{zeros:.0%}",
            first.parameters / speed.parameters,
            speed.prefill / first.prefill,
            speed.decode / first.decode,
        ]
        for one, zeros, speed in zip(result.perplexities, result.zeros, result.speed.rows, strict=True)
    ]
    head = [
        "model",
        "perplexity",
        "× dense",
        "zeros",
        "parameters, dense / left",
        "prefill, × dense",
        "decoding, × dense",
    ]
    return {
        "setting": f"Perplexity: {dense.measured_on.line()}.\n",
        "depth": table(head, cells),
        "verdict": against_the_paper(result),
    }


def against_the_paper(result: Evaluation) -> str:
    """Losses multiply; zeros buy no time; which criterion chooses better. The paper's numbers are of LLaMA-2-7B."""
    assert result.speed is not None
    dense, first = result.perplexities[0], result.speed.rows[0]
    names = [row.model for row in result.speed.rows]
    found = dict(zip(names, result.perplexities, strict=True))
    cost = {name: p.value / dense.value for name, p in found.items()}
    faster = {row.model: row.decode / first.decode for row in result.speed.rows}
    removed = [f"{name} -{REMOVED}" for name in ("bi", "rho")]
    sparse = [name for name in names if name.startswith("dense, ")]
    both, thinned = f"{removed[0]}, wanda uniform {SPARSITY:g}", f"dense, wanda uniform {SPARSITY:g}"
    expected = cost[removed[0]] * cost[thinned]
    excess = found[both].windows + dense.windows - found[removed[0]].windows - found[thinned].windows
    low, high = interval_of(excess)
    combined = [name for name in names if "wanda" in name and name not in sparse]
    bi, rho = (found[name] for name in removed)
    return bullets(
        verdict(
            max(faster[n] for n in sparse) < min(faster[n] for n in removed),
            f"zeros buy no time, removed layers do: decoding is {span(faster[n] for n in sparse)} × dense with zeros, "
            f"{span(faster[n] for n in removed)} × with {REMOVED} layers removed (the paper: 29.5 against 24.2 tokens "
            "a second).",
        ),
        decided(
            low > 1 - TOLERANCE and high < 1 + TOLERANCE,
            high < 1 - TOLERANCE or low > 1 + TOLERANCE,
            f"the losses of both multiply: {short(cost[both])} against {short(expected)} × dense, "
            f"{interval(cost[both] / expected, low, high)} of it (the paper: 11.1 / 5.47 = 2.03 against 1.45 × 1.27 = "
            "1.84).",
        ),
        verdict(
            max(faster[n] for n in combined) < 1,
            "there the combination is slower than the dense model (18.8 tokens a second), by what its sparse weights "
            f"cost; here it decodes {span(faster[n] for n in combined)} × as fast: storage is dense.",
        ),
        stated(
            f"there ρ chooses better than Block Influence (7.92 against 8.45); here {short(cost[removed[1]])} against "
            f"{short(cost[removed[0]])} × dense, {interval(*against(rho, bi))} of its perplexity.",
            judged(told(rho, bi), "better"),
        ),
    )


if __name__ == "__main__":
    typer.run(main)
