"""OWL: layers with more outliers among their Wanda scores stay denser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lyapunov_prune.allocation.schedule import SPARSEST, Schedule
from lyapunov_prune.arguments import NonNegative, Positive
from lyapunov_prune.lazy import np, torch
from lyapunov_prune.linalg import lift
from lyapunov_prune.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.allocation.schedule import Amounts
    from lyapunov_prune.forward.reading import Readable
    from lyapunov_prune.models.projections import Projection


class OWL(Schedule):
    """Sparsity decreases with the layer's share of outliers `D_l`; the paper's M is `outlier`, its λ `width`.

    `D_l` is the share of the scores `|W_ij| ‖x_j‖₂` of all matrices of layer l that exceed M × their mean over the
    layer. `s_l` is linear in `D_l` with `max s − min s = 2λ` and mean `S`, the budget; equal shares give equal
    sparsities. Yin et al., Outlier weighed layerwise sparsity (ICML 2024), §3.2.

    Raises LyapunovPruneError for a budget that no shift meets inside `0 … 0.99`, and for parameters that are not
    positive.
    """

    outlier: Positive = 5.0
    width: NonNegative = 0.08

    help = "layers with more outliers among Wanda scores are kept denser"
    reference = "Yin et al., ICML 2024, arXiv:2310.05175, §3.2"
    needs = "batch"

    def amounts(self, model: PreTrainedModel, matrices: Matrices, budget: float, given: Any) -> Amounts:
        from lyapunov_prune.allocation.fitting import shift

        D = outlier_share(model, given, matrices, self.outlier)
        span = D.max() - D.min()
        target = -2 * self.width * (D - D.min()) / span if span > 0 else np.zeros_like(D)
        amount = shift(target, matrices.sizes, budget, high=SPARSEST)
        return amount, {"outlier": self.outlier, "width": self.width}


def outlier_share(model: PreTrainedModel, batch: Readable, matrices: Matrices, outlier: float) -> np.ndarray:
    """`D_l` of the layer of every matrix, (M,) float64: share of its scores above `outlier` × their mean."""
    from lyapunov_prune.calibration.gathering import input_norms
    from lyapunov_prune.models.streamed import layer_held

    norms = input_norms(model, batch, matrices.projections)

    def scores(here: Sequence[Projection]) -> Iterator[torch.Tensor]:
        for p in here:
            W = lift(p.weight(model).detach()).abs()
            yield W * norms[p.name].to(W.device)

    counts: list[int] = []
    for layer, group in groupby(track(matrices.projections, "outliers"), lambda p: p.layer):
        here = [*group]
        with layer_held(model, layer):
            total, entries = (sum(of) for of in zip(*((float(s.sum()), s.numel()) for s in scores(here)), strict=True))
            limit = outlier * total / entries
            counts += [int((s > limit).sum()) for s in scores(here)]
    return matrices.layer_sum(np.array(counts)) / matrices.layer_sum(matrices.sizes)
