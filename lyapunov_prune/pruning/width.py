"""Which hidden channels leave the feed-forward blocks: by what the last matrix loses without each, on a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from lyapunov_prune.calibration.gram import damped
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import InMemory, takes_model
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.models.width import find_blocks, last_matrices, width_of
from lyapunov_prune.pruning.plan import PruningPlan

_DAMPING = 0.01
# What stays is a multiple of 64 where a block has 512 channels or more, which kernels like, else of 8.
_MULTIPLES = ((512, 64), (16, 8))


def energy(W: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """`‖W_j‖² G_jj`: the squared error of the output when channel j is zero, summed over the text.

    `W` (d × channels) is the last matrix and `G = Σ_t h_t h_tᵀ` that of the hidden vectors, both float64.
    """
    return W.square().sum(0) * gram.diagonal()


def surgeon(W: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """`‖W_j‖² / [H⁻¹]_jj`: the same when the other columns are refitted to make up for it, `H` the damped `G`.

    Hassibi and Stork, Second order derivatives for network pruning: Optimal Brain Surgeon (NeurIPS 1992).
    """
    H = damped(gram, W.shape[1], _DAMPING, W.device)
    return W.square().sum(0) / torch.cholesky_inverse(torch.linalg.cholesky(H)).diagonal()


SCORES: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {"energy": energy, "surgeon": surgeon}
DEFAULT: Final = "surgeon"


@takes_model
@in_eval_mode
@torch.no_grad()
def choose_channels(
    model: InMemory, batch: Readable, remove: int | float, *, score: str = DEFAULT, batch_size: int = 1
) -> PruningPlan:
    """The plan that leaves every feed-forward block without the channels of smallest `score` (a name of SCORES).

    `remove` is how many go, or as a float below 1 which share. The number that stays is rounded to a multiple of 64, in
    narrow blocks of 8. One forward of the layers over `batch`; memory: the Gram matrix of one block, float64.

    Raises LyapunovPruneError for a number that leaves none or all, as `find_blocks`, and for activations that are not
    finite.
    """
    reading, structure = read(model, batch), model.structure
    blocks = find_blocks(structure)
    width = width_of(structure, blocks)
    gone = width - staying(width, remove)
    chosen: list[tuple[int, ...]] = []

    def choose(here: Sequence[Projection], statistics: dict[str, Statistics]) -> None:
        (last,) = here
        gram = statistics[last.name].gram
        assert gram is not None
        costs = SCORES[score](lift(last.weight(model.model)), gram)
        chosen.append(tuple(sorted(costs.argsort(stable=True)[:gone].tolist())))

    stream(model.model, reading, last_matrices(structure, blocks), "gram", choose, batch_size=batch_size)
    return PruningPlan(
        remove=(),
        criterion=score,
        alpha=None,
        scores=np.empty(0),
        model=model.identity,
        measured_on=(reading.measured_on(),),
        channels=tuple(chosen),
        width=width,
    )


def staying(width: int, remove: int | float) -> int:
    """How many of `width` channels stay when `remove` should go (a number, or as a float a share).

    Raises LyapunovPruneError where none would stay, or none go.
    """
    wanted = width - (remove if isinstance(remove, int) else remove * width)
    multiple = next((m for least, m in _MULTIPLES if width >= least), 1)
    stay = round(wanted / multiple) * multiple
    if not 0 < stay < width:
        raise LyapunovPruneError(
            f"of {width} channels a multiple of {multiple} stays, and {remove:g} to remove leaves {stay:d}; give "
            f"{multiple} to {width - multiple}, or a share"
        )
    return stay
