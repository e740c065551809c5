"""The reductions by name: a new one is a file in `reductions` and a row here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.merging.reduction import Reduction
from lyapunov_prune.registry import Registry

if TYPE_CHECKING:
    from lyapunov_prune.models.feedforward import FeedForward

REDUCTIONS = Registry[Reduction](
    "reduction",
    "lyapunov_prune.merging.reductions",
    (
        "identity",
        "mean-gate",
        "scaled",
        "affine",
    ),
)
# The default of `joint`: after recovery never worse than the others, on two models (experiments/5_joint).
DEFAULT: Final = "affine"


def require_reduction(reduction: str, block: FeedForward) -> None:
    """Raise LyapunovPruneError unless `reduction` is one of REDUCTIONS and applies to blocks of this kind."""
    kind = "gated" if block.gated else "plain"
    if kind not in REDUCTIONS[reduction].blocks:
        fitting = " or ".join(name for name, entry in REDUCTIONS.items() if kind in entry.blocks)
        raise LyapunovPruneError(
            f"reduction {reduction} is for {' and '.join(REDUCTIONS[reduction].blocks)} feed-forward blocks, and layer "
            f"{block.layer} has a {kind} one; give {fitting}"
        )
