"""Criteria for layer removal and what they cost: Block Influence, kl, the blend over α, the greedy oracle, and attempts
to reach it with a tenth of its forwards (§6.5; representation hierarchies, §5).

Three attempts choose other layers: Block Influence measured anew after each removal, the run of layers that turns the
state least (angular), the oracle among three candidates on half the text. One mends: the MLP before each gap is given
the linear map that brings its layer's output nearest to what the removed layers made.

    python experiments/2_criteria/removal_criteria/run.py [--model MODEL] --calibration FILE --evaluation FILE

Writes oracle.json, divergence.json, removal.json, forwards.json, criteria.svg and alpha.svg beside this file.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model, draw, read_text, run_command
from experiments.removal_curve import RemovalCurve, RemovalRow, evaluate_removals, perplexity_figure
from experiments.statements import interval, measured, runs, short, span, table
from lyapunov_prune.data.batch import Split, require_disjoint
from lyapunov_prune.forward.hooks import residual_stream, run_backbone
from lyapunov_prune.forward.prefix import Prefix
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.roles import role
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.influence import block_influence
from lyapunov_prune.ranking.oracle import GreedyRemoval
from lyapunov_prune.report.drawing import COLOURS, log_axis, one_panel, svg
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.files import write_whole

HERE = Path(__file__).parent
REMOVALS = (2, 4, 7)
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
ALPHA_AT = 4
MENDED_ON, RIDGE = 4096, 0.1


def main(
    model: Model = Model(),
    calibration: Annotated[str, typer.Option(help="builtin, or a file")] = "builtin",
    evaluation: Annotated[str, typer.Option(help="builtin, or a file")] = "builtin",
    tokens: int = 8192,
) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    few = read_text(loaded, calibration, 1024, 512, half(calibration, 0))
    many = read_text(loaded, evaluation, tokens, 1024, half(evaluation, 1))
    require_disjoint(few, many)
    jobs = model.jobs / f"oracle-{few.text_hash[:16]}"
    oracle = lp.ranking.greedy_removal(loaded.model, few, REMOVALS[-1], folder=jobs)
    oracle.save(folder / "oracle.json")
    divergence = lp.predictions.skip_divergence(loaded.model, few)
    divergence.save(folder / "divergence.json")
    influence = lp.block_influence(loaded.model, few)
    profile = lp.measure_contraction(loaded.model, few, seeds=range(2))
    angular = lp.ranking.angular_distance(loaded.model, few)
    anew = remeasured(loaded)
    guided = lp.ranking.greedy_removal(
        loaded.model,
        few.ids[:1],
        REMOVALS[-1],
        candidates=lambda removed: anew(few.ids[:1], removed)[:3],
        criterion="oracle among 3",
    )
    blends = {f"α = {a:g}": lp.rank_layers(profile, influence, criterion="blend-minmax", alpha=a) for a in ALPHAS}
    order: list[int] = []
    for _ in range(REMOVALS[-1]):
        order.append(anew(few, order)[0])
    plans = {
        "bi": [lp.rank_layers(None, influence, criterion="bi").plan(n) for n in REMOVALS],
        "bi, measured anew": [lp.PruningPlan.given(loaded.model, order[:n]) for n in REMOVALS],
        "angular": [angular.plan(n) for n in REMOVALS],
        "kl": [lp.ranking.rank_by_divergence(divergence).plan(n) for n in REMOVALS],
        "oracle among 3": [guided.plan(n) for n in REMOVALS],
        "oracle": [oracle.plan(n) for n in REMOVALS],
        **{name: [ranking.plan(ALPHA_AT)] for name, ranking in blends.items()},
    }
    curve = evaluate_removals(loaded.model, plans, many)
    lesson = read_text(loaded, calibration, MENDED_ON, 512, half(calibration, 0))
    require_disjoint(lesson, many)
    dense = lp.perplexity(loaded.model, many, description="dense")
    rows = list(curve.rows)
    for name in ("bi", "angular", "oracle"):
        for plan in plans[name]:
            small = mended(loaded, plan, lesson)
            found = lp.perplexity(small, many, description=f"{name}, mended")
            _, low, high = found.ratio_to(dense)
            ratio = found.value / dense.value
            size = small.num_parameters()
            rows.append(RemovalRow(f"{name}, mended", plan.remove, found.value, ratio, low, high, size))
    curve = RemovalCurve(tuple(rows), curve.measured_on)
    curve.save(folder / "removal.json")
    L, again = loaded.structure.num_layers, float(sum(1 - n / loaded.structure.num_layers for n in range(REMOVALS[-1])))
    mending = (2 - REMOVALS[-1] / L) * MENDED_ON / few.ids.numel()
    forwards = {
        "measured_on": encode(oracle.measured_on),
        "bi": 1.0,
        "bi, measured anew": again,
        "angular": 1.0,
        "kl": (L + 1) / 2,
        "oracle among 3": (guided.forwards + again) / 2,
        "oracle": oracle.forwards,
        "bi, mended": 1 + mending,
        "angular, mended": 1 + mending,
        "oracle, mended": oracle.forwards + mending,
    }
    write_whole(folder / "forwards.json", json.dumps(forwards, indent=1) + "\n")
    shown = RemovalCurve(tuple(r for r in curve.rows if not r.criterion.startswith("α")), curve.measured_on)
    draw(folder, {"criteria": perplexity_figure(shown), "alpha": alpha_figure(curve)})


def half(text: str, which: int) -> Split:
    """A file of its own is taken whole, the built-in text by halves."""
    halves: tuple[Split, Split] = ("calibration", "evaluation")
    return halves[which] if text == "builtin" else "all"


def remeasured(loaded: lp.models.Decoder) -> Callable[[torch.Tensor | lp.TokenBatch, Sequence[int]], list[int]]:
    """The layers that are left when some are removed, by Block Influence measured on what is left."""
    with torch.no_grad():
        prefix = Prefix(loaded.structure, torch.arange(1, 33)[None])

    def order(batch: torch.Tensor | lp.TokenBatch, removed: Sequence[int]) -> list[int]:
        with prefix.without(tuple(removed)):
            score = block_influence(loaded.model, batch).influence
        return [int(layer) for layer in np.argsort(score) if layer not in removed]

    return order


@torch.no_grad()
def mended(loaded: lp.models.Decoder, plan: lp.PruningPlan, batch: lp.TokenBatch) -> PreTrainedModel:
    """The pruned model, the MLP before each gap taught to stand in for the removed layers.

    With m the MLP's output, h the state behind it and y the dense state behind the gap, E minimises
    `Σ_t ‖E m_t − (y_t − h_t)‖² / ‖y_t‖² + λ‖E‖²`, and its last matrix W becomes `(I + E) W`: plain transformers loads
    the result, and no parameter is added. Gap by gap, the states going through what is mended; a forward of each model.
    """
    small = lp.remove_layers(loaded.model, plan)
    kept = [k for k in range(loaded.structure.num_layers) if k not in plan.remove]
    ends = [*kept[1:], loaded.structure.num_layers]
    gaps = [(position, end) for position, end in enumerate(ends) if end != kept[position] + 1]
    targets: dict[int, list[torch.Tensor]] = {end: [] for _, end in gaps}

    def keep(boundary: int, hidden: torch.Tensor) -> None:
        if boundary in targets:
            targets[boundary].append(hidden[0])

    with residual_stream(loaded.structure, keep):
        for row in batch.ids:
            run_backbone(loaded.structure, row[None])
    structure = find_structure(small)
    prefix, at = Prefix(structure, batch.ids[:1]), 0
    states: list[torch.Tensor | None] = [None] * len(batch.ids)
    last = {p.layer: p for p in find_projections(wrap(small)) if role(p.component) == "mlp-out"}
    for position, end in gaps:
        outputs: list[torch.Tensor] = []
        module = small.get_submodule(last[position].module)
        handle = module.register_forward_hook(lambda module, args, output, outputs=outputs: outputs.append(output[0]))
        after = [prefix.advance(row[None], at, h, position + 1) for row, h in zip(batch.ids, states, strict=True)]
        handle.remove()
        m, h, y = (torch.cat(rows).double() for rows in (outputs, [s[0] for s in after], targets[end]))
        weight = 1 / y.pow(2).sum(-1, keepdim=True)
        gram = (weight * m).T @ m
        ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
        E = torch.linalg.solve(gram + ridge, (weight * m).T @ (y - h)).T
        W = last[position].weight(small)
        W += (E @ W.double()).to(W)
        if getattr(module, "bias", None) is not None:
            module.bias += (E @ module.bias.double()).to(W)
        states, at = [s + (out.double() @ E.T).to(s) for s, out in zip(after, outputs, strict=True)], position + 1
    return small


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


def written(folder: Path = HERE) -> dict[str, str]:
    """Perplexity of every criterion with what it costs in forwards, and of the blend over α."""
    curve = RemovalCurve.load(folder / "removal.json")
    rows = curve.rows
    forwards = json.loads((folder / "forwards.json").read_text(encoding="utf-8"))
    dense = rows[0].perplexity
    by = {(row.criterion, len(row.removed)): row for row in rows}
    cells: list[list[object]] = []
    for name in dict.fromkeys(row.criterion for row in rows[1:] if not row.criterion.startswith("α")):
        last = by[name, REMOVALS[-1]]
        few = [by[name, n].perplexity for n in REMOVALS[:-1]]
        whole = interval(last.perplexity, dense * last.low, dense * last.high)
        cells.append([name, forwards[name], *few, whole, runs(last.removed)])
    blends = [row for row in rows if row.criterion.startswith("α")]
    divergence = json.loads((folder / "divergence.json").read_text(encoding="utf-8"))
    return {
        "setting": f"Scores: {GreedyRemoval.load(folder / 'oracle.json').measured_on.line()}.\n"
        + measured(curve.measured_on, dense),
        "mended": mended_share(by, dense),
        "estimate": span(np.array(divergence["variance"]) / np.array(divergence["kl"])),
        "criteria": table(
            ["criterion", f"forwards for {REMOVALS[-1]}", *(f"{n} removed" for n in REMOVALS), "layers"], cells
        ),
        "alpha": table(
            ["α (0: Block Influence, 1: |ρ − 1|)", *(row.criterion[4:] for row in blends)],
            [["perplexity", *(row.perplexity for row in blends)]],
        ),
    }


def mended_share(by: dict[tuple[str, int], RemovalRow], dense: float) -> str:
    """How much of what a removal costs in perplexity mending takes back, in per cent."""
    rows = []
    for name in ("bi", "angular", "oracle"):
        pairs = [(by[name, n].perplexity, by[f"{name}, mended", n].perplexity) for n in REMOVALS]
        rows.append([name, *(f"{short(100 * (plain - mended) / (plain - dense))} %" for plain, mended in pairs)])
    return table(["taken back by mending", *(f"{n} removed" for n in REMOVALS)], rows)


if __name__ == "__main__":
    run_command(main, HERE / "removal.json", written)
