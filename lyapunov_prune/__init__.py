"""How compression errors travel through a transformer language model, and what it can do without."""

from lyapunov_prune.contraction import ContractionProfile, measure_contraction
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError, NonFiniteError
from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
from lyapunov_prune.evaluation.speed import Speed, measure_speed
from lyapunov_prune.gate import GateReport, verify_removal
from lyapunov_prune.influence import InfluenceProfile, block_influence
from lyapunov_prune.models.loading import Loaded, load
from lyapunov_prune.plan import PruningPlan
from lyapunov_prune.ranking import LayerRanking, rank_layers
from lyapunov_prune.surgery import remove_layers
from lyapunov_prune.text import TokenBatch, load_text

__all__ = [
    "CheckFailed",
    "ContractionProfile",
    "GateReport",
    "InfluenceProfile",
    "LayerRanking",
    "Loaded",
    "LyapunovPruneError",
    "NonFiniteError",
    "Perplexity",
    "PruningPlan",
    "Speed",
    "TokenBatch",
    "block_influence",
    "load",
    "load_text",
    "measure_contraction",
    "measure_speed",
    "perplexity",
    "rank_layers",
    "remove_layers",
    "verify_removal",
]
