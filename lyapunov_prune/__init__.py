"""How compression errors travel through a transformer language model, and what it can do without."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lyapunov_prune.activations import ActivationStatistics, activation_statistics
    from lyapunov_prune.allocation.allocation import Allocation
    from lyapunov_prune.allocation.schedules import allocate
    from lyapunov_prune.angular import AngularDistance, angular_distance
    from lyapunov_prune.approx import approximate
    from lyapunov_prune.attention_error import AttentionPaths, attention_paths
    from lyapunov_prune.bounds_report import BoundsReport
    from lyapunov_prune.branch_influence import SublayerInfluence, sublayer_influence
    from lyapunov_prune.budget import BudgetedRemoval, remove_under_budget
    from lyapunov_prune.candidates import ChoiceComparison, compare_choices
    from lyapunov_prune.checks import check_bounds, check_grid
    from lyapunov_prune.choice_items import ChoiceItem, load_items
    from lyapunov_prune.compression.compress import Compressed, CompressionReport, compress
    from lyapunov_prune.contraction import ContractionProfile, measure_contraction
    from lyapunov_prune.divergence import SkipDivergence, rank_by_divergence, skip_divergence
    from lyapunov_prune.errors import CheckFailed, LyapunovPruneError, NonFiniteError
    from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
    from lyapunov_prune.evaluation.speed import Speed, measure_speed
    from lyapunov_prune.evaluation.tasks import TaskScores, evaluate_tasks, load_tasks
    from lyapunov_prune.gate import GateReport, verify_removal
    from lyapunov_prune.generation import GenerationDivergence, compare_generation
    from lyapunov_prune.healing import Healed, Healing, heal
    from lyapunov_prune.hierarchy import HierarchyProbe, probe_layers
    from lyapunov_prune.influence import InfluenceProfile, block_influence
    from lyapunov_prune.jacobian import JacobianNorms, sublayer_jacobians
    from lyapunov_prune.models.loading import Loaded, load
    from lyapunov_prune.models.plain import merge_adapters
    from lyapunov_prune.oracle import GreedyRemoval, greedy_removal
    from lyapunov_prune.plan import PruningPlan
    from lyapunov_prune.ranking import LayerRanking, rank_layers, rank_sublayers
    from lyapunov_prune.sensitivity import Sensitivity, measure_sensitivity
    from lyapunov_prune.surgery import drop_sublayers, remove_layers
    from lyapunov_prune.text import TokenBatch, load_text

__all__ = [
    "ActivationStatistics",
    "Allocation",
    "AngularDistance",
    "AttentionPaths",
    "BoundsReport",
    "BudgetedRemoval",
    "CheckFailed",
    "ChoiceComparison",
    "ChoiceItem",
    "Compressed",
    "CompressionReport",
    "ContractionProfile",
    "GateReport",
    "GenerationDivergence",
    "GreedyRemoval",
    "Healed",
    "Healing",
    "HierarchyProbe",
    "InfluenceProfile",
    "JacobianNorms",
    "LayerRanking",
    "Loaded",
    "LyapunovPruneError",
    "NonFiniteError",
    "Perplexity",
    "PruningPlan",
    "Sensitivity",
    "SkipDivergence",
    "Speed",
    "SublayerInfluence",
    "TaskScores",
    "TokenBatch",
    "activation_statistics",
    "allocate",
    "angular_distance",
    "approximate",
    "attention_paths",
    "block_influence",
    "check_bounds",
    "check_grid",
    "compare_choices",
    "compare_generation",
    "compress",
    "drop_sublayers",
    "evaluate_tasks",
    "greedy_removal",
    "heal",
    "load",
    "load_items",
    "load_tasks",
    "load_text",
    "measure_contraction",
    "measure_sensitivity",
    "measure_speed",
    "merge_adapters",
    "perplexity",
    "probe_layers",
    "rank_by_divergence",
    "rank_layers",
    "rank_sublayers",
    "remove_layers",
    "remove_under_budget",
    "skip_divergence",
    "sublayer_influence",
    "sublayer_jacobians",
    "verify_removal",
]

# Names are imported on first use: torch takes seconds, and `lyapunov-prune --help` needs none of it.
_HOMES = {
    "activations": ("ActivationStatistics", "activation_statistics"),
    "allocation.allocation": ("Allocation",),
    "allocation.schedules": ("allocate",),
    "angular": ("AngularDistance", "angular_distance"),
    "approx": ("approximate",),
    "attention_error": ("AttentionPaths", "attention_paths"),
    "bounds_report": ("BoundsReport",),
    "branch_influence": ("SublayerInfluence", "sublayer_influence"),
    "budget": ("BudgetedRemoval", "remove_under_budget"),
    "candidates": ("ChoiceComparison", "compare_choices"),
    "checks": ("check_bounds", "check_grid"),
    "choice_items": ("ChoiceItem", "load_items"),
    "compression.compress": ("Compressed", "CompressionReport", "compress"),
    "contraction": ("ContractionProfile", "measure_contraction"),
    "divergence": ("SkipDivergence", "rank_by_divergence", "skip_divergence"),
    "errors": ("CheckFailed", "LyapunovPruneError", "NonFiniteError"),
    "evaluation.perplexity": ("Perplexity", "perplexity"),
    "evaluation.speed": ("Speed", "measure_speed"),
    "evaluation.tasks": ("TaskScores", "evaluate_tasks", "load_tasks"),
    "gate": ("GateReport", "verify_removal"),
    "generation": ("GenerationDivergence", "compare_generation"),
    "healing": ("Healed", "Healing", "heal"),
    "hierarchy": ("HierarchyProbe", "probe_layers"),
    "influence": ("InfluenceProfile", "block_influence"),
    "jacobian": ("JacobianNorms", "sublayer_jacobians"),
    "models.loading": ("Loaded", "load"),
    "models.plain": ("merge_adapters",),
    "oracle": ("GreedyRemoval", "greedy_removal"),
    "plan": ("PruningPlan",),
    "ranking": ("LayerRanking", "rank_layers", "rank_sublayers"),
    "sensitivity": ("Sensitivity", "measure_sensitivity"),
    "surgery": ("drop_sublayers", "remove_layers"),
    "text": ("TokenBatch", "load_text"),
}


def __getattr__(name: str) -> Any:
    if name == "linalg":
        return import_module("lyapunov_prune.linalg")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"lyapunov_prune.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
