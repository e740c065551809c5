"""The rules of the house: imports point one way, and what depends on a family stays in `models/`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lyapunov_prune"
# From the bottom up; a module may import from its own line's left and from the lines above.
ORDER = [
    "errors",
    "files",
    "overlap",
    "arrays",
    "results",
    "history",
    "progress",
    "tensor_files",
    "claim",
    "store",
    "training_state",
    "lean_sources",
    "theorems",
    "norms",
    "linalg",
    "models.held",
    "models.digest",
    "models.structure",
    "models.plain",
    "models.folder",
    "models.adapter_folder",
    "models.judged",
    "models.loading",
    "models.tokenizers",
    "models.layer_settings",
    "models.adaptations",
    "models.families",
    "models.kinds",
    "models.projections",
    "models.roles",
    "outline",
    "text",
    "tracing",
    "prefix",
    "propagation",
    "contraction",
    "influence",
    "activations",
    "branches",
    "sublayers",
    "branch_influence",
    "jacobian",
    "profile",
    "plan",
    "angular",
    "ranking",
    "logits",
    "decoding",
    "reloading",
    "cards",
    "saving",
    "gate",
    "surgery",
    "checkpoint",
    "disk_gate",
    "shards",
    "bound_check",
    "bounds",
    "probability_bounds",
    "bounds_report",
    "replacement",
    "layer_changes",
    "adapters",
    "distillation",
    "approx",
    "trajectory",
    "compression.masks",
    "compression.magnitude",
    "compression.weight_only",
    "compression.lowrank",
    "compression.statistics",
    "compression.gathering",
    "compression.wanda",
    "allocation.allocation",
    "allocation.uniform",
    "allocation.owl",
    "allocation.alpha_pruning",
    "allocation.atp",
    "allocation.lyapunov",
    "allocation.guidelines",
    "allocation.bits",
    "allocation.schedules",
    "compression.gram",
    "compression.sparsegpt",
    "compression.whitened",
    "compression.balanced",
    "compression.rounding",
    "compression.methods",
    "compression.streaming",
    "compression.compress",
    "checks",
    "evaluation.perplexity",
    "similarity",
    "scoring",
    "divergence",
    "budget",
    "spaces",
    "hierarchy",
    "generation",
    "attention_error",
    "choice_items",
    "candidates",
    "sweep",
    "oracle",
    "studies",
    "sensitivity",
    "evaluation.removal",
    "evaluation.compressions",
    "healing",
    "evaluation.speed",
    "evaluation.task_items",
    "evaluation.harness",
    "evaluation.tasks",
    "evaluation.evaluation",
    "report.drawing",
    "report.figures",
    "report.hierarchy",
    "report.choices",
    "report.compressions",
    "report.internals",
    "report.generation",
    "report.maps",
    "report.removal",
    "report.tasks",
    "report.page",
    "demo",
    "terminal",
    "options",
    "inputs",
    "commands.measure",
    "commands.change",
    "commands.predictions",
    "cli",
]
FAMILY_WORDS = {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "opt"}


def modules() -> dict[str, Path]:
    names = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {name: path for name, path in names.items() if not name.endswith("__init__")}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lyapunov_prune."):
            found.add(node.module.removeprefix("lyapunov_prune."))
        elif isinstance(node, ast.ImportFrom) and node.module == "lyapunov_prune":
            found |= {alias.name for alias in node.names}
    return found


def test_every_module_has_its_place() -> None:
    assert set(modules()) == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_one_way(name: str) -> None:
    later = set(ORDER[ORDER.index(name) :])
    assert not imports(modules()[name]) & later


def test_the_report_never_sees_a_model() -> None:
    for name in [n for n in ORDER if n.startswith("report.")]:
        assert "transformers" not in modules()[name].read_text()
        assert "import torch" not in modules()[name].read_text()


def test_no_module_outside_models_names_a_family() -> None:
    for name, path in modules().items():
        if name.startswith("models."):
            continue
        tree = ast.parse(path.read_text())
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not strings & FAMILY_WORDS, name
