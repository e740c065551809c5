"""Calibration layer by layer: every matrix sees the inputs that the compressed layers before it produce."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Count
from lyapunov_prune.calibration.gathering import Gathering, lends
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.dealing import own_share
from lyapunov_prune.forward.products import Product, watched_products
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.forward.states import each_layer, in_order
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.experts import Routing
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.launched import alone, sharing
from lyapunov_prune.models.projections import Projection, by_layer

# Gets a layer's matrices and their statistics, and changes the layer's weights in place.
Change = Callable[[Sequence[Projection], dict[str, Statistics]], None]


def stream(
    model: PreTrainedModel,
    batch: Readable,
    projections: Sequence[Projection],
    needs: str,
    change: Change,
    *,
    batch_size: Count = 1,
    weights: Mapping[str, Sequence[torch.Tensor]] | None = None,
    dense: Reading | None = None,
    relative: bool = False,
) -> None:
    """For each layer in order: gather the statistics of its matrices, call `change`, and pass on its new output.

    Every layer runs twice: once for its statistics and once, compressed, for the input of the next (`each_layer`). For
    a streamed model both happen in one forward while the layer is held.

    `needs` is `norms`; `gram` (`Σ_t x_t x_tᵀ`, n × n, float64, shared by matrices with the same input); `magnitudes`,
    which adds `Σ_t |x_t|`; or `sensitivity`, which adds `Σ_t g_t g_tᵀ`, with `g_t` the gradient of `⟨v, layer output⟩`,
    `v ~ N(0, I)`, at the matrix's output, before `change` (`Statistics`). The seed is the layer's index, so the
    statistics of a layer do not depend on which other layers are requested.

    `weights` of the tokens (`token_weights`, with the same `batch_size`) enter all sums; `relative` weights a token by
    `1/‖y_t‖²` of the matrix's output instead, if no router sends it to an expert. With `dense`, a reading of the same
    batch by the unchanged model, the `drift` is gathered too; the layers of that model run once alongside. While a
    layer's statistics are gathered, its experts are then sent the tokens that the unchanged model sends them, with its
    router's weights: the compressed model may route otherwise, and a drift compares the same tokens.

    Processes of `accelerate launch` share the windows and add their sums, but for `weights`, `sensitivity` and experts.

    Memory: that of `each_layer`, and the statistics of one layer.

    Raises LyapunovPruneError for a matrix that no token reaches, for activations that are not finite, and with `dense`
    for experts whose router acts outside their module.
    """
    reading = read(wrap(model), batch)
    matrices = by_layer(projections)

    each_call = None if weights is None else {name: iter(of_calls) for name, of_calls in weights.items()}
    among = sharing(reading.model)
    # What depends on the order of all windows is measured on all of them by every process.
    whole = weights is not None or needs == "sensitivity" or lends(projections)
    whole |= among is not None and len(reading.batch) < among.num_processes
    runs = None if dense is None else in_order(dense if whole else own_share(dense), matrices, batch_size)

    def visit(layer: int, outputs: Iterator[torch.Tensor]) -> None:
        here = matrices[layer]
        if dense is None or runs is None:
            change(here, _gathered(reading.model, here, needs, outputs, each_call, None, relative))
            return
        beside = _Beside(dense.model, here)
        given = [(reading.model.get_submodule(name), partial(beside.reroute, name)) for name in beside.experts]
        with hooked(before=given):
            both = beside.outputs(next(runs)[1], outputs)
            statistics = _gathered(reading.model, here, needs, both, each_call, beside.inputs, relative)
        change(here, statistics)

    with alone() if whole else nullcontext():
        each_layer(reading if whole else own_share(reading), matrices, visit, batch_size, "calibration")


def _gathered(
    model: PreTrainedModel,
    here: Sequence[Projection],
    needs: str,
    outputs: Iterator[torch.Tensor],
    weights: Mapping[str, Iterator[torch.Tensor]] | None,
    inputs: Mapping[str, list[torch.Tensor]] | None,
    relative: bool,
) -> dict[str, Statistics]:
    """The statistics of a layer's matrices; the layer runs while its `outputs` are consumed."""
    generator = torch.Generator().manual_seed(here[0].layer)
    gathering = Gathering(model, here, needs, weights, inputs, relative=relative)
    with gathering.watching(), torch.set_grad_enabled(needs == "sensitivity"):
        for output in outputs:
            if needs == "sensitivity":
                gathering.differentiate(output, generator)
    return gathering.statistics()


class _Beside:
    """A layer of the dense model that runs one piece of the batch ahead of the same layer of the compressed model.

    `inputs` are those of its matrices for the piece that the compressed layer runs next, by `Projection.product`.
    """

    def __init__(self, dense: PreTrainedModel, here: Sequence[Projection]) -> None:
        self.dense, self.here = dense, here
        self.inputs: dict[str, list[torch.Tensor]] = {}
        self.experts = sorted({p.routed for p in here if p.routed})
        self._routings: dict[str, list[Routing]] = {}

    def outputs(self, ahead: Iterator[torch.Tensor], outputs: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """`outputs` of the compressed layer; before each, the dense layer runs while `ahead` is consumed."""
        hooks = [(self.dense.get_submodule(name), partial(self._note, name)) for name in self.experts]
        while True:
            self.inputs.clear()
            with hooked(before=hooks), watched_products(self.dense, self.here, self._keep):
                if next(ahead, None) is None:
                    return
            yield next(outputs)

    def reroute(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a call of experts of the compressed model: send them what the dense router chose for this call."""
        routings = self._routings.get(name)
        return routings.pop(0).sent(args, kwargs) if routings else None  # a call with lent tokens stays as it is

    def _keep(self, product: Product) -> None:
        if product.x.numel():
            self.inputs.setdefault(product.name, []).append(product.x.detach())

    def _note(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        routing = Routing.of(args, kwargs)
        if routing is None:
            raise LyapunovPruneError(
                f"the router of {name} lies outside it, so its experts cannot be given the tokens of the dense model; "
                "leave out correction"
            )
        self._routings.setdefault(name, []).append(routing)
