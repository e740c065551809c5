"""The last matrix of every feed-forward block and expert, fitted in closed form to the hidden channels that stay."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.data.batch import Tokens
from lyapunov_prune.evaluation.judging import Judgement
from lyapunov_prune.forward.masking import masked
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import lift, require_numbers
from lyapunov_prune.mending.judge import fitting_and_judges, losses
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.models.decoder import Decoder, Model, in_memory, wrap
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.sharing import shared_memo
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.models.units import Kept, Refits

_DAMPING = 1.0  # a smaller one fits noise if there are fewer tokens than channels (experiments/2_criteria/width)


def refitted(W: torch.Tensor, gram: torch.Tensor, kept: torch.Tensor, damping: float = _DAMPING) -> torch.Tensor:
    """`Ŵ = W_K + (W G_:K − W_K G_KK) (G_KK + λI)⁻¹`, d × kept channels, float64.

    It minimises `Σ_t ‖W h_t − Ŵ h_t,K‖² + λ ‖Ŵ − W_K‖²` over all matrices on the channels K that are `kept`. `W` (d ×
    channels) and `G = Σ_t h_t h_tᵀ` are float64, and `λ = damping · mean(diag G)`. For large λ the result is the plain
    cut.
    """
    inner, cut = gram[kept][:, kept], W[:, kept]
    H = inner + damping * gram.diagonal().mean() * torch.eye(len(inner)).to(gram)
    return cut + torch.cholesky_solve((W @ gram[:, kept] - cut @ inner).T, torch.linalg.cholesky(H)).T


@in_eval_mode
def judged_refits(model: Model, kept: Kept, batch: Readable, judge: Tokens | None = None) -> tuple[Refits, MendReport]:
    """Refit the last matrix of every unit to its channels `kept` (layers × units); no matrices if it does not pay.

    Each is d × kept channels, in the model's dtype, by layer and index of the unit. They are fitted on half of
    `batch`, layer by layer on the outputs of the refitted layers before, and judged against the plain cut on the other
    half and on `judge`, another text; with None the dense model writes one. An expert is fitted on the
    tokens that its router sends to it, and if they are fewer than its channels also on tokens of the layer
    (`calibration.lending`). `model` is not changed.

    Raises LyapunovPruneError for fewer windows than judge (8 of `batch`, 4 of `judge`), and for a matrix beyond the
    model's dtype.
    """
    reading = read(in_memory(model), batch)
    fitting, *judges = fitting_and_judges(reading, judge)
    changed, weights = refit_blocks(reading.decoder, kept, fitting)
    judged = []
    for each in judges:
        with masked(reading.decoder, dict(enumerate(kept))):
            cut = losses(each, ())
        judged.append(Judgement(cut, losses(Reading(changed, each.batch), ()), each.measured_on()))
    report = MendReport((), fitting.batch.ids.numel(), 0, fitting.measured_on(), *judged)
    return (weights if report.kept else {}), report


def refit_blocks(decoder: Decoder, kept: Kept, fitting: Reading) -> tuple[Decoder, Refits]:
    """Refit the last matrices on `fitting`; also a model that has them, zero at other channels, and shares all else."""
    places, lasts = dict[str, tuple[tuple[int, int], torch.Tensor]](), list[Projection]()
    for i, (units, here) in enumerate(zip(decoder.units, kept, strict=True)):
        for j, (unit, channels) in enumerate(zip(units, here, strict=True)):
            if channels is not None:
                places[unit.out.name] = (i, j), channels
                lasts.append(unit.out)
    made = wrap(copy.deepcopy(decoder.model, shared_memo(decoder.model)))
    for parameter in {id(p): p for last in lasts for p in [last.stored(made.model)]}.values():
        parameter.data = parameter.data.clone()
    weights: dict[tuple[int, int], torch.Tensor] = {}

    def change(here: Sequence[Projection], statistics: dict[str, Statistics]) -> None:
        for last in here:
            W, gram, (place, channels) = last.weight(made.model), statistics[last.name].gram, places[last.name]
            assert gram is not None
            stays = channels.to(W.device)
            new = refitted(lift(W), gram, stays).to(W)
            require_numbers(new, f"{last.name}, refitted, in {W.dtype}")
            W.zero_()
            W[:, stays] = new
            weights[place] = new

    stream(made.model, fitting.batch, lasts, "gram", change)
    return made, weights
