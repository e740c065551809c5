"""Criteria for layer removal and what they cost: Block Influence, kl, the blend over α, the greedy oracle, and searches
that are meant to come near it with a tenth of its forwards (§6.5; representation hierarchies, §5).

    python experiments/14_removal_criteria/run.py [MODEL] --calibration FILE --evaluation FILE

Writes oracle.json, divergence.json, removal.json, forwards.json, criteria.svg and alpha.svg beside this file.
"""

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import draw

import lyapunov_prune as lp
from lyapunov_prune.evaluation.removal import RemovalCurve, evaluate_removals
from lyapunov_prune.files import write_whole
from lyapunov_prune.influence import block_influence
from lyapunov_prune.prefix import Prefix
from lyapunov_prune.report.drawing import COLOURS, log_axis, one_panel, svg
from lyapunov_prune.report.figures import perplexity_figure
from lyapunov_prune.text import require_disjoint
from lyapunov_prune.tracing import residual_stream, run_backbone

HERE = Path(__file__).parent
REMOVALS = (2, 4, 7)
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
ALPHA_AT = 4


def main(
    model: str = "smollm2-135m",
    calibration: Annotated[str, typer.Option(help="builtin, or a file")] = "builtin",
    evaluation: Annotated[str, typer.Option(help="builtin, or a file")] = "builtin",
    tokens: int = 8192,
) -> None:
    loaded = lp.load(model)
    few = lp.load_text(calibration, loaded.tokenizer, tokens=1024, context=512, split=half(calibration, 0))
    many = lp.load_text(evaluation, loaded.tokenizer, tokens=tokens, context=1024, split=half(evaluation, 1))
    require_disjoint(few, many)
    jobs = Path("runs") / "experiments" / f"oracle-{few.text_hash[:16]}"
    oracle = lp.greedy_removal(loaded.model, few, REMOVALS[-1], folder=jobs, resume=True)
    oracle.save(HERE / "oracle.json")
    print(oracle, end="\n\n")
    divergence = lp.skip_divergence(loaded.model, few)
    divergence.save(HERE / "divergence.json")
    influence = lp.block_influence(loaded.model, few)
    profile = lp.measure_contraction(loaded.model, few, seeds=range(2))
    blends = {f"α = {a:g}": lp.rank_layers(profile, influence, criterion="blend", alpha=a) for a in ALPHAS}
    order = remeasured(loaded, few, REMOVALS[-1])
    plans = {
        "bi": [lp.rank_layers(None, influence, criterion="bi").plan(n) for n in REMOVALS],
        "bi, measured anew": [lp.PruningPlan.given(loaded.model, order[:n]) for n in REMOVALS],
        "run of layers": [lp.PruningPlan.given(loaded.model, nearest_run(loaded, few, n)) for n in REMOVALS],
        "kl": [lp.rank_by_divergence(divergence).plan(n) for n in REMOVALS],
        "oracle": [oracle.plan(n) for n in REMOVALS],
        **{name: [ranking.plan(ALPHA_AT)] for name, ranking in blends.items()},
    }
    curve = evaluate_removals(loaded.model, plans, many)
    curve.save(HERE / "removal.json")
    L = loaded.structure.num_layers
    forwards = {
        "bi": 1.0,
        "bi, measured anew": float(sum(1 - n / L for n in range(REMOVALS[-1]))),
        "run of layers": 1.0,
        "kl": (L + 1) / 2,
        "oracle": oracle.forwards,
    }
    write_whole(HERE / "forwards.json", str(forwards).replace("'", '"') + "\n")
    shown = RemovalCurve(tuple(r for r in curve.rows if not r.criterion.startswith("α")), curve.measured_on)
    draw(HERE, {"criteria": perplexity_figure(shown), "alpha": alpha_figure(curve)})
    print(curve, forwards, sep="\n\n")


def half(text: str, which: int) -> str:
    """A file of its own is taken whole, the built-in text by halves."""
    return ("calibration", "evaluation")[which] if text == "builtin" else "all"


def remeasured(loaded: lp.Loaded, batch: lp.TokenBatch, remove: int) -> list[int]:
    """The layer of least Block Influence, again and again, measured on what is left."""
    removed: list[int] = []
    with torch.no_grad():
        prefix = Prefix(loaded.structure, batch.ids[:1])
    for _ in range(remove):
        with prefix.without(tuple(removed)):
            score = block_influence(loaded.model, batch).influence.copy()
        score[removed] = np.inf
        removed.append(int(score.argmin()))
    return removed


def nearest_run(loaded: lp.Loaded, batch: lp.TokenBatch, count: int) -> list[int]:
    """The `count` layers in a row whose last output is nearest in angle to their first input."""
    states: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for row in batch.ids:
            found: list[torch.Tensor] = []
            with residual_stream(loaded.structure, lambda layer, h, found=found: found.append(h[0].double())):
                run_backbone(loaded.structure, row[None])
            states.append(found)
    L = loaded.structure.num_layers
    distance = [
        sum(float(1 - torch.cosine_similarity(h[k], h[k + count], dim=-1).mean()) for h in states)
        for k in range(L - count + 1)
    ]
    first = int(np.argmin(distance))
    return list(range(first, first + count))


def alpha_figure(curve: RemovalCurve) -> str:
    page, axes = one_panel(6.5, 2.8)
    rows = [r for r in curve.rows if r.criterion.startswith("α")]
    y = np.array([r.perplexity for r in rows])
    bars = np.abs(curve.dense.perplexity * np.array([[r.low, r.high] for r in rows]).T - y)
    axes.errorbar(ALPHAS, y, yerr=bars, marker="o", capsize=2, color=COLOURS["blend"])
    log_axis(axes)
    axes.set_xlabel("α: 0 is Block Influence alone, 1 is |ρ − 1| alone")
    axes.set_ylabel(f"perplexity, {ALPHA_AT} layers removed")
    return svg(page)


if __name__ == "__main__":
    typer.run(main)
