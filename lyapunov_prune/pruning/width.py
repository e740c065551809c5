"""Choose hidden channels to remove from feed-forward blocks and experts, by the error without each, on a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from lyapunov_prune.arguments import Count
from lyapunov_prune.calibration.gram import damped
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Streamable, takes_model
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.models.width import find_width
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import ChannelsGone
from lyapunov_prune.results.result import MeasuredOn

_DAMPING = 0.01
# The kept number is a multiple of 64 for blocks of 512 channels or more, which suits kernels, else of 8.
_MULTIPLES = ((512, 64), (16, 8))


def energy(W: torch.Tensor, statistics: Statistics) -> torch.Tensor:
    """`‖W_j‖² Σ_t a_t h_tj²`: the squared error of the output when channel j is zero, summed over the text.

    `W` (d × channels, float64) is the last matrix, `h_t` the hidden vectors. `a_t = 1` is energy pooling, in which the
    few tokens of large outputs decide; `a_t = 1/‖W h_t‖²` is token pooling: every token's error is relative to its
    output, as a norm behind the block makes it.
    """
    return W.square().sum(0) * statistics.norms.square()


def surgeon(W: torch.Tensor, statistics: Statistics) -> torch.Tensor:
    """`‖W_j‖² / [H⁻¹]_jj`: the same error if the other columns are refitted; `H` is the damped Gram matrix.

    Hassibi and Stork, Second order derivatives for network pruning: Optimal Brain Surgeon (NeurIPS 1992).
    """
    assert statistics.gram is not None
    H = damped(statistics.gram, _DAMPING, W.device)
    return W.square().sum(0) / torch.cholesky_inverse(torch.linalg.cholesky(H)).diagonal()


@dataclass(frozen=True)
class ChannelScore:
    """How much a channel costs: a function of the last matrix and of the sums that it needs (`stream`)."""

    needs: str
    cost: Callable[[torch.Tensor, Statistics], torch.Tensor]
    relative: bool = False


# `token` was the best one on Gemma, and as good as `energy` on SmolLM2 (experiments/2_criteria).
SCORES: Final = {
    "token": ChannelScore("norms", energy, relative=True),
    "energy": ChannelScore("norms", energy),
    "surgeon": ChannelScore("gram", surgeon),
}
DEFAULT: Final = "token"


@dataclass(frozen=True, eq=False)
class ChannelCosts:
    """The cost of removing each hidden channel of every unit, by `score`; the cheapest of each unit go first.

    `costs` (layers × units) holds one number per channel, None for units that keep their channels. `widths` are the
    numbers of channels, and `width` is that of the units that the setting of the config names (`models.width.Width`).
    """

    score: str
    costs: tuple[tuple[torch.Tensor | None, ...], ...]
    widths: tuple[tuple[int, ...], ...]
    width: int
    measured_on: MeasuredOn

    def plan(self, remove: int | float) -> PruningPlan:
        """The plan that removes `remove` channels, or that share of them (`staying`), from every unit of `width`."""
        gone = self.width - staying(self.width, remove)

        def cheapest(costs: torch.Tensor | None) -> tuple[int, ...]:
            if costs is None:
                return ()
            first: list[int] = costs.argsort(stable=True)[: gone * len(costs) // self.width].tolist()
            return tuple(sorted(first))

        return PruningPlan(
            gone=ChannelsGone((), tuple(tuple(map(cheapest, here)) for here in self.costs), self.widths),
            criterion=self.score,
            alpha=None,
            scores=np.empty(0),
            model=self.measured_on.model,
            measured_on=(self.measured_on,),
        )


@in_eval_mode
def channel_costs(reading: Reading, score: str = DEFAULT, batch_size: Count = 1) -> ChannelCosts:
    """Measure `score`, a name of SCORES, for every channel that can leave (`find_width`), in two forwards.

    For an expert the sums are over the tokens that its router sends to it, weighted by the square of the router's
    weight (`calibration.statistics`). `surgeon` takes the memory of the Gram matrices of one layer.

    Raises LyapunovPruneError as `find_width`, and for activations that are not finite.
    """
    width = find_width(reading.decoder)
    by = SCORES[score]
    found: dict[str, torch.Tensor] = {}

    def measure(here: Sequence[Projection], statistics: dict[str, Statistics]) -> None:
        for last in here:
            found[last.name] = by.cost(lift(last.weight(reading.model)), statistics[last.name]).cpu()

    lasts = [unit.out for here in width.units for unit in here if unit is not None]
    stream(reading.model, reading, lasts, by.needs, measure, batch_size=batch_size, relative=by.relative)
    return ChannelCosts(
        score,
        tuple(tuple(None if unit is None else found[unit.out.name] for unit in here) for here in width.units),
        tuple(tuple(unit.width for unit in here) for here in reading.decoder.units),
        width.width,
        reading.measured_on(),
    )


@takes_model
def choose_channels(
    model: Streamable, batch: Readable, remove: int | float, *, score: str = DEFAULT, batch_size: Count = 1
) -> PruningPlan:
    """The plan that removes the channels of smallest `score` (a name of SCORES) from every feed-forward block.

    `remove` is their number or, as a float below 1, their share. The number that stays is rounded to a multiple of 64,
    in narrow blocks of 8. In a mixture they leave every expert, and blocks whose width the same setting gives; other
    blocks keep theirs. Raises LyapunovPruneError if none or all would stay, and as `channel_costs`.
    """
    reading = read(model, batch)
    staying(find_width(reading.decoder).width, remove)  # raises before anything is measured
    return channel_costs(reading, score, batch_size).plan(remove)


def multiple_of(width: int) -> int:
    """The number of kept channels is a multiple of this."""
    return next((m for least, m in _MULTIPLES if width >= least), 1)


def staying(width: int, remove: int | float) -> int:
    """How many of `width` channels stay if `remove` (a number, or a float as a share) should be removed.

    Raises LyapunovPruneError if none would stay, or none would be removed.
    """
    wanted = width - (remove if isinstance(remove, int) else remove * width)
    multiple = multiple_of(width)
    stay = round(wanted / multiple) * multiple
    if not 0 < stay < width:
        raise LyapunovPruneError(
            f"removing {remove:g} of {width} channels leaves {stay:d}, and the width must be a multiple of {multiple}; "
            f"give {multiple} to {width - multiple}, or a share"
        )
    return stay
