"""Layers removed, weights pruned, and both: perplexity and speed side by side (§6.5, Table 5).

    python experiments/3_compression/depth_and_sparsity/run.py [--model MODEL] [--text FILE]

Writes depth.json beside this file.
"""

from pathlib import Path

import numpy as np

import lyapunov_prune as lp
from experiments.common import Model, run_command, texts
from experiments.compressions import against
from experiments.statements import interval, short, table
from lyapunov_prune.evaluation.evaluation import Evaluation, zero_share
from lyapunov_prune.evaluation.perplexity import interval_of

HERE = Path(__file__).parent
REMOVED, SPARSITY = 4, 0.5


def main(model: Model = Model(), text: str = "builtin", tokens: int = 4096) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
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


def written(folder: Path = HERE) -> dict[str, str]:
    """Perplexity and speed beside the dense model's, and the speed that the parameters left would allow."""
    result = Evaluation.load(folder / "depth.json")
    assert result.speed is not None
    dense, first = result.perplexities[0], result.speed.rows[0]
    cells = [
        [
            speed.model,
            one.value,
            interval(one.value / dense.value, *one.ratio_to(dense)[1:]),
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
    of = dict(zip((row.model for row in result.speed.rows), result.perplexities, strict=True))
    thinned, both = "dense, wanda uniform 0.5", "bi -4, wanda uniform 0.5"
    excess = of[both].windows + dense.windows - of["bi -4"].windows - of[thinned].windows
    return {
        "setting": f"Perplexity: {dense.measured_on.line()}.\n",
        "depth": table(head, cells),
        "product": short(of["bi -4"].value * of[thinned].value / dense.value**2),
        "both / product": interval(float(np.exp(excess.mean())), *interval_of(excess)),
        "rho / bi": interval(*against(of["rho -4"], of["bi -4"])),
    }


if __name__ == "__main__":
    run_command(main, HERE / "depth.json", written)
