"""What others publish of models without a quarter of their depth, beside what was measured here; docs/results.md."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.published import REMOVALS
from experiments.statements import ratio, table

# Method, model and what was removed, what is kept, what it learnt from and what that cost, where it is published.
# Numbers are as printed there, on other models, tasks and texts than ours.
PUBLISHED = (
    (
        "Minitron depth, Model Optimizer 0.43",
        "Qwen3-8B, 36 → 28 layers, 8.19 B → 6.65 B",
        "MMLU 0.749 → 0.508 cut → 0.730 or 0.739; GSM8K 0.875 → 0.011 → 0.476 or 0.745",
        "distillation: 1.6 M tokens of WikiText, or 1.9 B of Nemotron-v2; 2 × H200",
        "NVIDIA Model-Optimizer, `examples/pruning/demo/advanced_compression_experiments.md`",
    ),
    (
        "Minitron depth, distilled",
        "Qwen3-8B, 36 → 24 layers, 8 B → 6 B",
        "MMLU 74.9 → 72.5",
        "distillation: about 90 B tokens; 6,000 H100 hours",
        "NVIDIA TensorRT-Model-Optimizer, `examples/nemo_run/prune_distill`",
    ),
    (
        "LinearPatch",
        "LLaMA-3-8B, 5 of 32 layers",
        "94.15 % of the accuracy on question answering; 95.16 % distilled",
        "none; distilled: 5,000 samples, 30 minutes on one card",
        "arXiv:2505.24680, abstract",
    ),
    (
        "ReplaceMe",
        "several models, up to 25 %",
        "about 90 % of the performance on open benchmarks",
        "a small calibration set, no training",
        "arXiv:2505.02819, abstract",
    ),
    (
        "EvoPress",
        "Llama, Mistral, Phi; layers, attentions or MLPs",
        "its paper has perplexities, which are not repeated here",
        "a search over about 17 M tokens, no training",
        "arXiv:2410.14649",
    ),
)


HEAD = ("method", "model, removed", "kept", "learnt from, cost", "source")
QUARTER = 0.25
WIKITEXT, REPORTED = "wiki", "report-wikitext"
BY_HAND, SHRINK, MENDING, SUMMARY = (
    importlib.import_module(f"experiments.{name}.run")
    for name in ("6_recovery.never_worse", "6_recovery.shrink", "6_recovery.mending", "1_contraction.summary")
)


def written() -> dict[str, str]:
    return {"quarter": table(HEAD, [*PUBLISHED, of_the_paper(), *shrunk(), *mended(), *gap_maps(), *accuracies()])}


def of_the_paper() -> tuple[str, ...]:
    """The structural-sensitivity paper, eight of 32 layers by its blend, without any recovery."""
    (dense, right), (cut, left) = (REMOVALS["LLaMA-2-7B", name, n] for name, n in (("dense", 0), ("blend", 8)))
    kept = f"perplexity {dense:g} → {cut:g}, {cut / dense:.3g} × dense; accuracy {right:g} → {left:g} %"
    return (
        "blend of ρ and Block Influence",
        "LLaMA-2-7B, 8 of 32 layers",
        kept,
        "none",
        "structural sensitivity, Table 4",
    )


def shrunk() -> Iterator[tuple[str, ...]]:
    for r in SHRINK.results():
        cost = f"choosing, mending and healing on {Path(r.learnt_on.text).stem}: {r.seconds / 60:.0f} minutes"
        gone = f"{r.name}, {len(r.removed)} of {r.measured_on[0].model.num_layers} layers"
        yield "here: `shrink`", gone, _over(r.over[REPORTED]), f"{cost} on a CPU", "chapter 6"


def mended() -> Iterator[tuple[str, ...]]:
    for r in _loaded(BY_HAND.HERE, BY_HAND.NeverWorse):
        state = next(s for s in r.states if s.name == "mended")
        minutes = f"{state.seconds / 60:.0f} minutes{_where(r)}"
        cost = f"choosing and mending on {Path(r.text).stem}, no training: {minutes}"
        if WIKITEXT in r.text:
            yield "here: `prune --mend`", _gone(r, state.removed), _over(state.windows - r.dense), cost, "chapter 6"


def gap_maps() -> Iterator[tuple[str, ...]]:
    """Mending and other methods, reimplemented, on the run of layers that is nearest to a quarter."""
    for r in _loaded(MENDING.HERE, MENDING.MendedOnOneText):
        if WIKITEXT in r.measured_on.text and (closed := [x for x in r.removals if x.others]):
            run = min(closed, key=lambda x: _from_a_quarter(len(x.removed), r.measured_on.model.num_layers))
            for way, found in {"mending": run.mended, **run.others}.items():
                over = _over(found.windows - r.dense.windows)
                cost = f"{r.calibrated_on.tokens:,} tokens of {Path(r.measured_on.text).stem}, no training"
                yield f"here: {way}", _gone(r, run.removed), over, cost, "chapter 6"


def accuracies() -> Iterator[tuple[str, ...]]:
    """Mean accuracy of four tasks without the layers of least Block Influence, and without recovery."""
    for c in SUMMARY.columns():
        count = min(SUMMARY.COUNTS, key=lambda n: _from_a_quarter(n, c.layers))
        dense, cut = SUMMARY.percent(c, "dense", 0), SUMMARY.percent(c, "bi", count)
        if dense and cut:
            kept = f"mean accuracy of four tasks {dense} → {cut} %"
            yield "here: `bi`", f"{c.name}, {count} of {c.layers} layers", kept, "none", "chapter 1, Table 3"


def _loaded(folder: Path, kind: Any) -> list[Any]:
    return [kind.load(path) for path in sorted(folder.glob("*.json"))]


def _gone(result: Any, removed: Sequence[int]) -> str:
    model = result.measured_on.model
    return f"{model.name}, {len(removed)} of {model.num_layers} layers"


def _where(result: Any) -> str:
    return " on a CPU" if result.measured_on.device == "cpu" else " on a GPU"


def _over(losses: np.ndarray) -> str:
    return f"perplexity {ratio(losses)} × dense"


def _from_a_quarter(count: int, layers: int) -> float:
    return abs(count / layers - QUARTER)
