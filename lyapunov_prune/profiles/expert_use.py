"""How the router of every layer uses its experts: tokens, weights and outputs of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn

from lyapunov_prune.arguments import Count
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.dealing import dealt, summed
from lyapunov_prune.forward.hooks import require_finite, run_backbone
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Streamable, runs_model
from lyapunov_prune.models.experts import Routing, unweighted
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.mixtures import Router
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

_Signed = Annotated[np.ndarray, Per("layer", "expert", least=-np.inf, finite=False)]


@dataclass(frozen=True)
class ExpertUse(Result):
    """Per layer and expert, (L, E) float64, NaN in layers without experts.

    - `tokens`: how many tokens the router sent to the expert;
    - `weight`: the sum of the router weights `g_t` of these tokens;
    - `saliency`: the mean over these tokens of `g_t ‖f(x_t)‖₂`, with `f(x_t)` the output of the expert before it is
      weighted (REAP, arXiv:2510.13999); 0 for an expert that got no token.
    """

    tokens: Annotated[np.ndarray, Per("layer", "expert", finite=False)]
    weight: _Signed
    saliency: _Signed
    measured_on: MeasuredOn

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(np.flatnonzero(np.isfinite(self.tokens[:, 0])).tolist())

    @property
    def unused(self) -> dict[int, tuple[int, ...]]:
        """The experts that got no token, by layer."""
        return {i: tuple(np.flatnonzero(self.tokens[i] == 0).tolist()) for i in self.layers if 0 in self.tokens[i]}

    def share(self, of: np.ndarray) -> np.ndarray:
        """`tokens` or `weight` as shares of their sum in the layer, (L, E)."""
        return of / of.sum(-1, keepdims=True)

    def to_frame(self) -> pd.DataFrame:
        layers, experts = np.array(self.layers), np.arange(self.tokens.shape[1])
        rows = {"layer": np.repeat(layers, len(experts)), "expert": np.tile(experts, len(layers))}
        columns = {"tokens": self.share(self.tokens), "weight": self.share(self.weight), "saliency": self.saliency}
        return pd.DataFrame({**rows, **{name: values[layers].ravel() for name, values in columns.items()}})

    def headline(self) -> str:
        return f"Shares of tokens and of router weight, and REAP saliency, by expert\n{self.measured_on.line()}"


@runs_model
def expert_use(model: Streamable, batch: Readable, *, batch_size: Count = 1) -> ExpertUse:
    """Measure `ExpertUse` in one pass over `batch`.

    Every chosen expert runs twice: in the forward, and once more for its output before it is weighted. A choice of what
    computes nothing (`models.mixtures`), or with weight 0, counts for no expert. Memory: three sums for each expert,
    and one layer's outputs of all chosen experts.

    Raises NonFiniteError naming the layer when the model is not finite, and LyapunovPruneError for a model without
    experts, and for experts in an unknown form (`models.mixtures`).
    """
    reading = read(model, batch)
    structure = reading.structure
    mixtures = reading.decoder.mixtures
    sums = {i: torch.zeros(3, mixtures.router.experts, dtype=torch.float64) for i in mixtures.layers}
    modules = {i: structure.layers[i].get_submodule(mixture.experts) for i, mixture in mixtures.layers.items()}
    with hooked(before=[(module, partial(_add, i, mixtures.router, sums[i])) for i, module in modules.items()]):
        dealt(reading, batch_size, lambda first, ids: run_backbone(structure, ids), "experts")
    summed(reading.model, *sums.values())
    values = np.full((structure.num_layers, 3, mixtures.router.experts), np.nan)
    for i, of_layer in sums.items():
        values[i] = of_layer.numpy()
    require_finite(structure, reading.batch.ids, reading.batch.text, values[list(sums)])
    tokens, weight, output = np.ascontiguousarray(values.transpose(1, 0, 2))
    return ExpertUse(tokens, weight, output / np.maximum(tokens, 1), reading.measured_on())


def _add(
    layer: int, router: Router, sums: torch.Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before a call of the experts of `layer`: add the tokens, weights and weighted norms of each to `sums` (3, E)."""
    routing = Routing.of(args, kwargs)
    if routing is None or routing.experts.shape[-1] != router.chosen:
        raise LyapunovPruneError(
            f"the use of the experts of layer {layer} cannot be seen: they are not called with tokens, chosen experts "
            "and weights; remove whole layers instead"
        )
    states = routing.tokens.repeat_interleave(router.chosen, 0)
    chosen, weights = routing.experts.reshape(-1, 1), routing.weights.reshape(-1)
    norms = torch.linalg.vector_norm(lift(unweighted(module, states, chosen)), dim=-1).cpu()
    weight, expert = lift(weights).cpu(), chosen.flatten().cpu()
    real = (expert < router.experts) & (weight != 0)
    norms, weight, expert = norms[real], weight[real], expert[real]
    for row, values in enumerate((torch.ones_like(weight), weight, weight * norms)):
        sums[row].index_add_(0, expert, values)
