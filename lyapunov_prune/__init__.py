"""How compression errors travel through a transformer language model, and what it can do without."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lyapunov_prune.allocation.allocation import Allocation
    from lyapunov_prune.allocation.schedules import allocate
    from lyapunov_prune.bounds.approximate import approximate
    from lyapunov_prune.bounds.check import check_bounds, check_grid
    from lyapunov_prune.bounds.report import BoundsReport
    from lyapunov_prune.compression.compress import Compressed, CompressionReport, compress
    from lyapunov_prune.data.batch import TokenBatch
    from lyapunov_prune.data.choices import ChoiceItem, load_items
    from lyapunov_prune.data.text import load_text
    from lyapunov_prune.errors import CheckFailed, LyapunovPruneError, NonFiniteError
    from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
    from lyapunov_prune.evaluation.speed import Speed, measure_speed
    from lyapunov_prune.evaluation.tasks import TaskScores, evaluate_tasks, load_tasks
    from lyapunov_prune.healing.heal import Healed, Healing, heal
    from lyapunov_prune.models.adapters import merge_adapters
    from lyapunov_prune.models.loading import Loaded, load
    from lyapunov_prune.predictions.attention_paths import AttentionPaths, attention_paths
    from lyapunov_prune.predictions.choices import ChoiceComparison, compare_choices
    from lyapunov_prune.predictions.divergence import SkipDivergence, skip_divergence
    from lyapunov_prune.predictions.generation import GenerationDivergence, compare_generation
    from lyapunov_prune.predictions.hierarchy import HierarchyProbe, probe_layers
    from lyapunov_prune.profiles.activations import ActivationStatistics, activation_statistics
    from lyapunov_prune.profiles.contraction import ContractionProfile, measure_contraction
    from lyapunov_prune.profiles.influence import InfluenceProfile, block_influence
    from lyapunov_prune.profiles.jacobian import JacobianNorms, sublayer_jacobians
    from lyapunov_prune.profiles.sublayer_influence import SublayerInfluence, sublayer_influence
    from lyapunov_prune.pruning.gate import GateReport, verify_removal
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.pruning.surgery import drop_sublayers, remove_layers
    from lyapunov_prune.ranking.angular import AngularDistance, angular_distance
    from lyapunov_prune.ranking.budget import BudgetedRemoval, remove_under_budget
    from lyapunov_prune.ranking.kl import rank_by_divergence
    from lyapunov_prune.ranking.oracle import GreedyRemoval, greedy_removal
    from lyapunov_prune.ranking.rank import rank
    from lyapunov_prune.ranking.ranking import LayerRanking, rank_layers, rank_sublayers
    from lyapunov_prune.sensitivity.sensitivity import Sensitivity, measure_sensitivity

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
    "rank",
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
    "allocation.allocation": ("Allocation",),
    "allocation.schedules": ("allocate",),
    "bounds.approximate": ("approximate",),
    "bounds.check": (
        "check_bounds",
        "check_grid",
    ),
    "bounds.report": ("BoundsReport",),
    "compression.compress": (
        "Compressed",
        "CompressionReport",
        "compress",
    ),
    "data.batch": ("TokenBatch",),
    "data.choices": (
        "ChoiceItem",
        "load_items",
    ),
    "data.text": ("load_text",),
    "errors": (
        "CheckFailed",
        "LyapunovPruneError",
        "NonFiniteError",
    ),
    "evaluation.perplexity": (
        "Perplexity",
        "perplexity",
    ),
    "evaluation.speed": (
        "Speed",
        "measure_speed",
    ),
    "evaluation.tasks": (
        "TaskScores",
        "evaluate_tasks",
        "load_tasks",
    ),
    "healing.heal": (
        "Healed",
        "Healing",
        "heal",
    ),
    "models.adapters": ("merge_adapters",),
    "models.loading": (
        "Loaded",
        "load",
    ),
    "predictions.attention_paths": (
        "AttentionPaths",
        "attention_paths",
    ),
    "predictions.choices": (
        "ChoiceComparison",
        "compare_choices",
    ),
    "predictions.divergence": (
        "SkipDivergence",
        "skip_divergence",
    ),
    "predictions.generation": (
        "GenerationDivergence",
        "compare_generation",
    ),
    "predictions.hierarchy": (
        "HierarchyProbe",
        "probe_layers",
    ),
    "profiles.activations": (
        "ActivationStatistics",
        "activation_statistics",
    ),
    "profiles.contraction": (
        "ContractionProfile",
        "measure_contraction",
    ),
    "profiles.influence": (
        "InfluenceProfile",
        "block_influence",
    ),
    "profiles.jacobian": (
        "JacobianNorms",
        "sublayer_jacobians",
    ),
    "profiles.sublayer_influence": (
        "SublayerInfluence",
        "sublayer_influence",
    ),
    "pruning.gate": (
        "GateReport",
        "verify_removal",
    ),
    "pruning.plan": ("PruningPlan",),
    "pruning.surgery": (
        "drop_sublayers",
        "remove_layers",
    ),
    "ranking.angular": (
        "AngularDistance",
        "angular_distance",
    ),
    "ranking.budget": (
        "BudgetedRemoval",
        "remove_under_budget",
    ),
    "ranking.kl": ("rank_by_divergence",),
    "ranking.oracle": (
        "GreedyRemoval",
        "greedy_removal",
    ),
    "ranking.rank": ("rank",),
    "ranking.ranking": (
        "LayerRanking",
        "rank_layers",
        "rank_sublayers",
    ),
    "sensitivity.sensitivity": (
        "Sensitivity",
        "measure_sensitivity",
    ),
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
