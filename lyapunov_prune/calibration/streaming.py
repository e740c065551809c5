"""Calibration layer by layer: every matrix sees the inputs that the compressed layers before it produce."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gathering import Gathering
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.layers import each_layer, in_order
from lyapunov_prune.forward.products import Product, watched_products
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.models.decoder import wrap
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
    batch_size: int = 1,
    weights: Mapping[str, Sequence[torch.Tensor]] | None = None,
    dense: Reading | None = None,
) -> None:
    """For each layer in order: gather the statistics of its matrices, call `change`, and pass on its new output.

    Every layer runs twice: once for its statistics and once, compressed, for the input of the next (`each_layer`). For
    a streamed model both happen in one forward while the layer is held.

    `needs` is `norms`; `gram` (`Σ_t x_t x_tᵀ`, n × n, float64, shared by matrices with the same input); `magnitudes`,
    which adds `Σ_t |x_t|`; or `sensitivity`, which adds `Σ_t g_t g_tᵀ`, with `g_t` the gradient of `⟨v, layer output⟩`,
    `v ~ N(0, I)`, at the matrix's output, before `change` (`Statistics`). The seed is the layer's index, so the
    statistics of a layer do not depend on which other layers are requested.

    `weights` of the tokens (`token_weights`, with the same `batch_size`) enter all sums. With `dense`, a reading of the
    same batch by the unchanged model, the `drift` is gathered too; the layers of that model run once alongside.

    Memory: that of `each_layer`, and the statistics of one layer.

    Raises LyapunovPruneError for a matrix that no token reaches, for activations that are not finite, and for experts
    with `dense`, because the compressed model may send other tokens to an expert.
    """
    expert = next((p.name for p in projections if p.expert is not None), None)
    if dense is not None and expert:
        raise LyapunovPruneError(
            f"{expert} is sent other tokens in the dense than in the compressed model, and a correction compares the "
            "same ones; leave out --correction"
        )
    reading = read(wrap(model), batch)
    matrices = by_layer(projections)

    each_call = None if weights is None else {name: iter(of_calls) for name, of_calls in weights.items()}
    runs = None if dense is None else in_order(dense, matrices, batch_size)

    def visit(layer: int, outputs: Iterator[torch.Tensor]) -> None:
        here, inputs = matrices[layer], None
        if dense is not None and runs is not None:
            inputs, outputs = _beside(dense.model, here, next(runs)[1], outputs)
        change(here, _gathered(reading.model, here, needs, outputs, each_call, inputs))

    each_layer(reading, matrices, visit, batch_size, "calibration")


def _gathered(
    model: PreTrainedModel,
    here: Sequence[Projection],
    needs: str,
    outputs: Iterator[torch.Tensor],
    weights: Mapping[str, Iterator[torch.Tensor]] | None,
    inputs: Mapping[str, list[torch.Tensor]] | None,
) -> dict[str, Statistics]:
    """The statistics of a layer's matrices; the layer runs while its `outputs` are consumed."""
    generator = torch.Generator().manual_seed(here[0].layer)
    gathering = Gathering(model, here, needs, weights, inputs)
    with gathering.watching(), torch.set_grad_enabled(needs == "sensitivity"):
        for output in outputs:
            if needs == "sensitivity":
                gathering.differentiate(output, generator)
    return gathering.statistics()


def _beside(
    dense: PreTrainedModel, here: Sequence[Projection], ahead: Iterator[torch.Tensor], outputs: Iterator[torch.Tensor]
) -> tuple[dict[str, list[torch.Tensor]], Iterator[torch.Tensor]]:
    """The inputs of a layer's matrices in the dense model, by module, for the piece of `outputs` that runs next.

    The dense layer runs one piece ahead, while its outputs `ahead` are consumed.
    """
    inputs: dict[str, list[torch.Tensor]] = {}

    def keep(product: Product) -> None:
        inputs.setdefault(product.name, []).append(product.x.detach())

    def pieces() -> Iterator[torch.Tensor]:
        while True:
            inputs.clear()
            with watched_products(dense, here, keep):
                if next(ahead, None) is None:
                    return
            yield next(outputs)

    return inputs, pieces()
