# The public names, once: `lyapunov_prune/__init__.py` imports them from here on first use, type checkers read them.
# What a room alone speaks of, results above all, is in the `__init__.pyi` of that room: `lp.ranking.LayerRanking`.
from . import allocation as allocation
from . import bounds as bounds
from . import compression as compression
from . import data as data
from . import evaluation as evaluation
from . import healing as healing
from . import joint as joint
from . import linalg as linalg
from . import models as models
from . import predictions as predictions
from . import profiles as profiles
from . import pruning as pruning
from . import ranking as ranking
from . import sensitivity as sensitivity
from . import shrinking as shrinking
from .allocation.schedules import allocate as allocate
from .bounds.check import check_bounds as check_bounds
from .checkpoints.saving import save as save
from .checkpoints.streamed import load_streamed as load_streamed
from .compression.compress import compress as compress
from .data.batch import TokenBatch as TokenBatch
from .data.text import load_text as load_text
from .errors import CheckFailed as CheckFailed
from .errors import LyapunovPruneError as LyapunovPruneError
from .errors import NonFiniteError as NonFiniteError
from .evaluation.perplexity import perplexity as perplexity
from .evaluation.speed import measure_speed as measure_speed
from .evaluation.tasks import evaluate_tasks as evaluate_tasks
from .forward.own_text import self_generated as self_generated
from .healing.heal import heal as heal
from .models.adapters import merge_adapters as merge_adapters
from .models.loading import load as load
from .predictions.generation import compare_generation as compare_generation
from .predictions.hierarchy import probe_layers as probe_layers
from .profiles.contraction import measure_contraction as measure_contraction
from .profiles.influence import block_influence as block_influence
from .pruning.gate import verify_removal as verify_removal
from .pruning.plan import PruningPlan as PruningPlan
from .pruning.removal import mend as mend
from .pruning.removal import remove_layers as remove_layers
from .ranking.measured import rank_layers as rank_layers
from .ranking.rank import rank as rank
from .sensitivity.sensitivity import measure_sensitivity as measure_sensitivity
from .shrinking.shrink import shrink as shrink

__version__: str
