"""How far the next-token probabilities of two models are apart, or of one without a layer, its attention or MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from lyapunov_prune.arguments import Count, Positive
from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity, perplexity_of
from lyapunov_prune.forward.anatomy import Kind, silent
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.forward.states import Change, changed_finals, finals_without_each
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import InMemory, Streamable, runs_model, runs_models
from lyapunov_prune.predictions.spaces import BLOCK, kl_divergence
from lyapunov_prune.predictions.tiles import MEASURES, measures
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd, rows
from lyapunov_prune.results.result import MeasuredOn, Result

# Tolerance: sums of non-negative terms, each rounded.
_ROUNDING = 1e-9


_Divergence = Annotated[np.ndarray, Per("layer", least=-_ROUNDING, finite=False)]


@dataclass(frozen=True)
class SkipDivergence(Result):
    """Per layer, (L,) float64: divergence of the next-token prediction when the layer is skipped, in nats.

    With `p_t = softmax(z_t/T)` of the dense model and `q_t = softmax((z_t + Δz_t)/T)` of the model without the layer,
    means over every position `t` of a window except the last:

    - `variance = mean_t Var_{p_t}(Δz_t) / (2T²)`, the second-order estimate of `kl`, not a bound (Demystifying When
      Pruning Works via Representation Hierarchies, Theorem 3, eq. 9);
    - `kl = mean_t KL(p_t‖q_t)` and `reverse_kl = mean_t KL(q_t‖p_t)`, exact;
    - `flipped`: top-1 disagreement, the share of positions whose most likely token differs;
    - `variance_r = mean_t Var_{r_t}(Δz_t) / (2T²)` with `r_i = p_i²/‖p‖²`, the second-order estimate of `1 − cos(p_t,
      q_t)` (Theorem 2, eq. 8), which gives likely tokens more weight.

    All are NaN for a layer whose removal makes the logits infinite or NaN.
    """

    variance: _Divergence
    kl: _Divergence
    reverse_kl: _Divergence
    flipped: _Divergence
    variance_r: _Divergence
    temperature: float
    measured_on: MeasuredOn

    def to_frame(self) -> pd.DataFrame:
        return rows(self, "layer", "variance", "variance_r", "kl", "reverse_kl", "flipped")

    def headline(self) -> str:
        return f"Divergence when one layer is skipped, T = {self.temperature:g}\n{self.measured_on.line()}"


@dataclass(frozen=True)
class SublayerDivergence(SkipDivergence):
    """`SkipDivergence` of one kind of sublayer (`attention` or `mlp`), silenced in one layer at a time.

    All are NaN for a layer without such a sublayer, and infinite where silencing it makes the logits infinite or NaN.
    """

    what: str

    def headline(self) -> str:
        part = {"attention": "attention", "mlp": "MLP"}[self.what]
        return f"Divergence when one layer's {part} is silenced, T = {self.temperature:g}\n{self.measured_on.line()}"


@runs_model
def skip_divergence(
    model: Streamable,
    batch: Readable,
    *,
    temperature: Positive = 1.0,
    batch_size: Count = 1,
    folder: Path | None = None,
) -> SkipDivergence:
    """Skip each layer of `model` in turn and measure `SkipDivergence` on `batch` (windows × tokens).

    Cost: every forward begins at the skipped layer, about L / 2 full forwards per batch, and the head is applied to L +
    1 final states per token. Memory: L × `batch_size` × tokens × width in the model's dtype, and one tile of tokens ×
    vocabulary. Sums and exponentials are in float64. A streamed model passes all windows and all variants through each
    layer file once (`final_without_each`); states that do not fit in memory go to `folder`.

    Raises NonFiniteError naming the layer when the dense model is not finite, and LyapunovPruneError for ids outside
    the vocabulary, windows longer than the context, a temperature that is not above 0, or a decoder whose logits are
    not a function of its final state.
    """
    reading = read(model, batch)

    def finals(ids: torch.Tensor) -> Iterator[_Finals]:
        return finals_without_each(reading, ids, folder, "skipping layers")

    means = _means(reading, finals, temperature, batch_size, "skipping layers")
    means[~np.isfinite(means).all(-1)] = np.nan
    variance, kl, reverse_kl, flipped, by_r = means.T.copy()
    return SkipDivergence(variance, kl, reverse_kl, flipped, by_r, float(temperature), reading.measured_on())


@runs_model
def sublayer_divergence(
    model: InMemory, batch: Readable, what: Kind, *, temperature: Positive = 1.0, batch_size: Count = 1
) -> SublayerDivergence:
    """Set the output of the sublayer `what` of each layer in turn to zero and measure `SublayerDivergence` on `batch`.

    Costs as much as `skip_divergence`. Raises the same errors, and LyapunovPruneError when `what` is neither
    `attention` nor `mlp` and for weights that are not plain matrices in memory.
    """
    reading = read(model, batch)
    layers = reading.structure.num_layers
    parts = {i: found.parts[what] for i, found in reading.anatomy.items() if what in found.parts}
    changes = [(i, partial(silent, part)) for i, part in parts.items()]
    values = np.full((layers, MEASURES), np.nan)
    if changes:
        means = divergences_of(reading, changes, temperature, batch_size, f"silencing {what}")
        means[~np.isfinite(means).all(-1)] = np.inf
        values[list(parts)] = means
    variance, kl, reverse_kl, flipped, by_r = values.T.copy()
    origin = reading.measured_on()
    return SublayerDivergence(variance, kl, reverse_kl, flipped, by_r, float(temperature), origin, what)


def divergences_of(
    reading: Reading, changes: Sequence[Change], temperature: float, batch_size: int, description: str
) -> np.ndarray:
    """Measure `SkipDivergence` for each of `changes`: (changes, 5) in the order of its fields, means over the batch.

    Raises NonFiniteError naming the layer when the dense model is not finite.
    """
    return _means(
        reading, lambda ids: iter([changed_finals(reading, ids, changes)]), temperature, batch_size, description
    )


_Finals = tuple[torch.Tensor, Sequence[torch.Tensor]]


@runs_models
def perplexities_and_kl(
    dense: Streamable, changed: Streamable, batch: Readable, *, batch_size: Count = 1
) -> tuple[tuple[Perplexity, Perplexity], np.ndarray | None]:
    """The perplexities of both models, and KL(dense ‖ changed) of every window, (windows,) float64, nats a token.

    Each model runs once, and log-likelihoods are in float64, those of `perplexity` alone in float32. No KL, None, for
    a model that is read from files layer by layer, and for logits of different widths. Raises like `perplexity`.
    """
    one, other = read(dense, batch), read(changed, batch)
    widths = {reading.structure.config.vocab_size for reading in (one, other)}
    if len(widths) > 1 or dense.stream or changed.stream:
        first, second = (perplexity(reading.decoder, reading, batch_size=batch_size) for reading in (one, other))
        return (first, second), None
    kl, *losses = _compared(one, other, batch_size, lambda first, ids: final_state(one.structure, ids))
    return (perplexity_of(one, losses[0]), perplexity_of(other, losses[1])), kl


def kl_by_window(dense: Reading, changed: Reading) -> tuple[np.ndarray, np.ndarray]:
    """KL(dense ‖ changed) of every window, and by how much its loss rises: (windows,) float64.

    Both are in nats a token, over all positions but the last. The dense model's final states are kept with its reading,
    so that it runs once for all models that are compared with it.
    """

    def kept(first: int, ids: torch.Tensor) -> torch.Tensor:
        return dense.once(("final state", first), lambda: final_state(dense.structure, ids))

    kl, before, after = _compared(dense, changed, 1, kept)
    return kl, after - before


def _compared(
    dense: Reading, changed: Reading, batch_size: int, dense_state: Callable[[int, torch.Tensor], torch.Tensor]
) -> np.ndarray:
    """KL(dense ‖ changed) and both losses of every window: (3, windows) float64, nats a token.

    `dense_state` gives the final states of the dense model for windows, from the number of the first of them.
    """
    from_states = dense.scorer.enters and changed.scorer.enters

    def logits(first: int, ids: torch.Tensor) -> Iterator[Iterable[tuple[torch.Tensor, ...]]]:
        """The logits of both models for each of the windows `ids`, a block of positions at a time."""
        if not from_states:
            return map(zip, dense.logits(ids), changed.logits(ids))
        states = zip(dense_state(first, ids), final_state(changed.structure, ids), strict=True)
        return (zip(dense.scorer.blocks(p[:-1]), changed.scorer.blocks(q[:-1]), strict=True) for p, q in states)

    @torch.no_grad()
    def means(first: int, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([mean(*each) for each in zip(logits(first, ids), ids[:, 1:].cpu(), strict=True)])

    def mean(pairs: Iterable[tuple[torch.Tensor, ...]], wanted: torch.Tensor) -> torch.Tensor:
        sums, start = torch.zeros(3, dtype=torch.float64), 0
        for pair in pairs:
            rows = max(1, BLOCK // pair[0].shape[-1])
            some = (*pair, wanted[start : start + len(pair[0])])
            sums += torch.cat([terms(*each) for each in zip(*(t.split(rows) for t in some), strict=True)], 1).sum(1)
            start += len(pair[0])
        return sums / len(wanted)

    def terms(dense: torch.Tensor, changed: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The divergence at every position, and the loss of the `wanted` token by both models: (3, positions)."""
        log_p, log_q = (lift(rows).log_softmax(-1) for rows in (dense, changed))
        at = wanted[:, None].to(log_p.device)
        losses = (-log.gather(1, at).squeeze(1) for log in (log_p, log_q))
        return torch.stack([kl_divergence(log_p, log_q), *losses]).cpu()

    found: np.ndarray = torch.cat(dealt(dense, batch_size, means, "divergence")).T.numpy()
    return found


def _means(
    reading: Reading,
    finals: Callable[[torch.Tensor], Iterator[_Finals]],
    temperature: float,
    batch_size: int,
    description: str,
) -> np.ndarray:
    def sums(first: int, ids: torch.Tensor) -> list[torch.Tensor]:
        return [measures(reading.scorer, dense, changed, temperature).sum(-1).cpu() for dense, changed in finals(ids)]

    each = [term for some in dealt(reading, batch_size, sums, description) for term in some]
    return (reduce(torch.add, each) / (reading.batch.tokens - len(reading.batch))).numpy()
