"""Activations at every matrix: rank of the outputs, tails and sparsity of the inputs.

These are the three properties that the paper associates with the early-layer catastrophe (structural sensitivity, §6.1:
low output covariance rank, heavy-tailed activations, low sparsity).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from transformers import PreTrainedModel

from lyapunov_prune.forward.hooks import require_finite, run_up_to
from lyapunov_prune.forward.products import Product, watched_products
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.linalg import all_finite, lift
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.progress import track
from lyapunov_prune.report.drawing import GREY, SMALL, STYLES, depth_axis, log_axis, panels, svg
from lyapunov_prune.results.frames import columns, pd
from lyapunov_prune.results.result import MeasuredOn, Result

# An entry this small relative to the root mean square of its token counts as zero.
NEGLIGIBLE = 0.01
# Bytes of sums held at once; further layers take another forward.
_BUDGET = 2 * 2**30
# What `_Matrix.statistics` gives, in this order.
_STATISTICS = ("width", "effective_rank", "token_rank", "participation_ratio", "peak_share", "kurtosis", "sparsity")


@dataclass(frozen=True)
class ActivationStatistics(Result):
    """Per matrix `y = W x` (M; a fused projection counts as one), float64; NaN for a matrix that no token reaches.

    Every expert is an entry, over the tokens that the router sends it.

    Outputs, with `λ` the eigenvalues of the covariance of y over tokens and `p = λ / Σλ`: `effective_rank = exp(−Σ p ln
    p)` (Roy and Vetterli, EUSIPCO 2007) and `participation_ratio = (Σλ)² / Σλ²`. A few tokens of very large norm
    (attention sinks) can dominate the covariance: `peak_share` is the share of `Σ_t ‖y_t − ȳ‖²` (ȳ the window's mean)
    in the largest token of each window, and `token_rank` is the effective rank of `y_t / ‖y_t‖`, which weights all
    tokens equally. No rank exceeds `tokens − 1`, so few tokens give low ranks.

    Inputs, over all entries: `kurtosis`, the excess kurtosis (0 for a normal distribution), and `sparsity`, the share
    of entries with `|x_ti| ≤ 0.01 · rms_i(x_t)`. The root mean square is per token, so that a sink does not make all
    other tokens look empty. The input of the last matrix of an MLP is the output of the nonlinearity: its sparsity is
    the paper's "GELU sparsity".
    """

    names: tuple[str, ...]
    components: tuple[str, ...]
    layers: tuple[int, ...]
    width: np.ndarray  # the dimension of y
    effective_rank: np.ndarray
    token_rank: np.ndarray
    participation_ratio: np.ndarray
    peak_share: np.ndarray
    kurtosis: np.ndarray
    sparsity: np.ndarray
    measured_on: MeasuredOn

    def to_frame(self) -> pd.DataFrame:
        matrices = {"layer": self.layers, "component": self.components}
        outputs = columns(self, "width", "effective_rank", "token_rank")
        outputs["participation"] = self.participation_ratio
        return pd.DataFrame({**matrices, **outputs, **columns(self, "peak_share", "kurtosis", "sparsity")})

    def headline(self) -> str:
        most = self.measured_on.tokens - 1
        return f"Activations of {len(self.names)} matrices (ranks are at most {most})\n{self.measured_on.line()}"


@runs_model
def activation_statistics(model: InMemory, batch: Readable, *, batch_size: int = 1) -> ActivationStatistics:
    """Measure rank, tails and sparsity of the activations at every matrix, see ActivationStatistics.

    Scatter matrices are summed in float64, the smaller one of tokens × tokens and width × width. Layers share one
    forward over the text as long as their sums fit in 2 GiB (all layers of SmolLM2-135M); a forward stops after the
    last layer it serves.

    Raises NonFiniteError naming the first layer with NaN or infinite activations, and LyapunovPruneError for ids
    outside the vocabulary, windows longer than the context, or weights that are not plain matrices.
    """
    reading = read(model, batch)
    batch, structure = reading.batch, reading.structure
    matrices = _matrices(find_projections(model), batch.ids.numel(), reading.model)
    statistics: dict[str, tuple[float, ...]] = {}
    for group in track(list(_groups(matrices, batch.ids.numel())), "activations"):
        for ids in reading.windows(batch_size):
            _feed(reading.model, structure, group, ids)
        for matrix in group:
            statistics[matrix.name] = matrix.statistics()
            require_finite(structure, batch.ids, f"{matrix.name} on {batch.text}", matrix.sums())
    values = dict(zip(_STATISTICS, np.array([statistics[m.name] for m in matrices]).T, strict=True))
    return ActivationStatistics(
        names=tuple(m.name for m in matrices),
        components=tuple(m.component for m in matrices),
        layers=tuple(m.layer for m in matrices),
        **values,
        measured_on=reading.measured_on(),
    )


class _Matrix:
    """One matrix and the sums over its inputs and outputs."""

    def __init__(self, name: str, component: str, layer: int, width: int, few: bool, projection: Projection) -> None:
        self.name, self.component, self.layer, self.width = name, component, layer, width
        self.projection, self.outputs, self.directions = projection, _Outputs(few), _Outputs(few)
        self.energy = self.peak_energy = 0.0
        self.pivot: torch.Tensor | None = None
        self.powers, self.entries, self.small = np.zeros(4), 0, 0

    def sums(self) -> np.ndarray:
        return np.array([self.energy, *self.powers])

    def add(self, x: torch.Tensor, y: torch.Tensor, shape: torch.Size) -> None:
        """Add the inputs and outputs (…, d) of one call, in a forward over ids of this shape."""
        if not x.numel():
            return
        self._add_input(lift(x))
        # An expert sees a few tokens of every window and not which window they are from: count them as one window.
        windows = shape[0] if y.numel() == shape.numel() * y.shape[-1] else 1
        outputs = lift(y).reshape(windows, -1, y.shape[-1])
        energy = (outputs - outputs.mean(1, keepdim=True)).square().sum(-1)
        self.energy += float(energy.sum())
        self.peak_energy += float(energy.amax(-1).sum())
        self.outputs.add(outputs.flatten(0, 1))
        self.directions.add(torch.nn.functional.normalize(outputs.flatten(0, 1), dim=-1))

    def _add_input(self, x: torch.Tensor) -> None:
        # Moments about a value near the mean: moments about zero would cancel where the mean is large.
        self.pivot = x.mean() if self.pivot is None else self.pivot
        centred = x - self.pivot
        square = centred.square()
        self.powers += [
            float(s) for s in (centred.sum(), square.sum(), (square * centred).sum(), square.square().sum())
        ]
        self.entries += x.numel()
        self.small += int((x.abs() <= NEGLIGIBLE * x.square().mean(-1, keepdim=True).sqrt()).sum())

    def statistics(self) -> tuple[float, ...]:
        """The fields of ActivationStatistics from `width` on; frees the sums."""
        if not self.entries or not all_finite(self.sums()):
            return (self.width, *[np.nan] * 6)
        rank, participation = spectral_ranks(self.outputs.eigenvalues())
        token_rank, _ = spectral_ranks(self.directions.eigenvalues())
        share = self.peak_energy / self.energy if self.energy > 0 else np.nan
        sparsity = self.small / self.entries
        del self.outputs, self.directions
        kurtosis = excess_kurtosis(self.powers / self.entries)
        return (self.width, rank, token_rank, participation, share, kurtosis, sparsity)


class _Outputs:
    """Tokens of one output: kept while there are few of them, then reduced to count, mean and scatter matrix."""

    def __init__(self, few: bool) -> None:
        self.few, self.count = few, 0
        self.rows: list[torch.Tensor] = []
        self.mean = self.scatter = torch.zeros(())

    def add(self, rows: torch.Tensor) -> None:
        """Add tokens (n, d), float64, by the update of Chan, Golub and LeVeque, which avoids cancellation."""
        if self.few:
            self.rows.append(rows)
            return
        new = len(rows)
        mean = rows.mean(0)
        centred = rows - mean
        step = mean - self.mean.to(mean)
        total = self.count + new
        self.scatter = (
            self.scatter.to(mean) + centred.T @ centred + torch.outer(step, step) * (self.count * new / total)
        )
        self.mean, self.count = self.mean.to(mean) + step * (new / total), total

    def eigenvalues(self) -> np.ndarray:
        """The eigenvalues of the scatter matrix that can be nonzero."""
        scatter = self.scatter
        if self.few:
            rows = torch.cat(self.rows)
            centred = rows - rows.mean(0)
            scatter = centred @ centred.T
        return torch.linalg.eigvalsh(scatter).cpu().numpy()


def spectral_ranks(eigenvalues: np.ndarray) -> tuple[float, float]:
    """`exp(−Σ p ln p)` and `(Σλ)² / Σλ²` for `p = λ / Σλ`; NaN for a spectrum of zeros."""
    kept = eigenvalues[eigenvalues > 0]  # rounding leaves some slightly negative
    if not len(kept):
        return np.nan, np.nan
    p = kept / kept.sum()
    return float(np.exp(-(p * np.log(p)).sum())), float(1 / np.square(p).sum())


def excess_kurtosis(moments: np.ndarray) -> float:
    """`m_4 / m_2² − 3` of a distribution with these first four moments about any point."""
    m1, m2, m3, m4 = moments
    variance = m2 - m1**2
    return float((m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / variance**2 - 3) if variance > 0 else np.nan


def _matrices(projections: Sequence[Projection], tokens: int, model: PreTrainedModel) -> list[_Matrix]:
    """One entry per product: parts of a fused projection are not separated."""
    parts: dict[str, list[Projection]] = {}
    for p in projections:
        parts.setdefault(p.product, []).append(p)
    matrices: list[_Matrix] = []
    for name, (p, *_) in parts.items():
        split = not p.stack and ":" in p.name
        role = p.component.rpartition(".")[0] if split else p.component
        width = parts[name][-1].stop
        matrices.append(_Matrix(name, role, p.layer, width, tokens < width, p))
    return matrices


def _groups(matrices: Sequence[_Matrix], tokens: int) -> Iterator[list[_Matrix]]:
    """Runs of consecutive layers whose sums fit in the budget, at least one layer each."""
    group: list[_Matrix] = []
    held = 0.0
    for layer in dict.fromkeys(m.layer for m in matrices):
        own = [m for m in matrices if m.layer == layer]
        needed = sum(16 * m.width * min(m.width, tokens) for m in own)
        if group and held + needed > _BUDGET:
            yield group
            group, held = [], 0.0
        group += own
        held += needed
    yield group


def _feed(model: PreTrainedModel, structure: Structure, group: Sequence[_Matrix], ids: torch.Tensor) -> None:
    """Run one forward over `ids` with hooks on the matrices of `group`; it stops after their last layer."""

    watched = {m.name: m for m in group}

    def seen(product: Product) -> None:
        y = product.output.transpose(-1, -2) if product.rows_are_features else product.output
        watched[product.name].add(product.x, y, ids.shape)

    with watched_products(model, [m.projection for m in group], seen):
        run_up_to(structure, structure.layers[group[-1].layer], ids, lambda *_: None)


def activation_figure(statistics: ActivationStatistics) -> str:
    """Rank of the outputs, kurtosis and sparsity of the inputs over depth, for the matrices of the MLP.

    The MLP's are the last matrix of a layer and those beside it in the same module.
    """
    figure, (ranks, tails, zeros) = panels(9, 7.2, 3)
    chosen = _mlp(statistics)
    relative = statistics.effective_rank / statistics.width
    alike = statistics.token_rank / statistics.width
    for (component, at), (colour, marker) in zip(chosen.items(), STYLES, strict=False):
        layers = np.array(statistics.layers)[at]
        ranks.plot(layers, relative[at], marker=marker, markersize=4, color=colour, label=component)
        ranks.plot(layers, alike[at], "--", marker=marker, markersize=4, color=colour, markerfacecolor="white")
    ranks.plot([], [], "--", color=GREY, label="every token weighed alike")
    log_axis(ranks)
    ranks.set_ylabel("effective rank of y / width")
    ranks.legend(frameon=False, fontsize=SMALL, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    for axes, values, label in (
        (tails, statistics.kurtosis, "excess kurtosis of x"),
        (zeros, 100 * statistics.sparsity, "sparsity of x, %"),
    ):
        # Gate and up see the same input: one line for both.
        shared: dict[bytes, list[str]] = {}
        for component, at in chosen.items():
            shared.setdefault(values[at].tobytes(), []).append(component)
        for names, (colour, marker) in zip(shared.values(), STYLES, strict=False):
            at = chosen[names[0]]
            layers = np.array(statistics.layers)[at]
            axes.plot(layers, values[at], marker=marker, markersize=4, color=colour, label=", ".join(names))
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=SMALL)
    _signed_log_axis(tails)
    zeros.set_ylim(bottom=0)
    depth_axis(zeros, max(statistics.layers) + 1)
    return svg(figure)


def _mlp(statistics: ActivationStatistics) -> dict[str, list[int]]:
    """Component -> places of its matrices: the last component of the first layer, then its neighbours."""
    first = [i for i, layer in enumerate(statistics.layers) if layer == statistics.layers[0]]
    own = list(dict.fromkeys(statistics.components[i] for i in first))
    module = own[-1].rpartition(".")[0]
    names = [own[-1], *(name for name in own[:-1] if name.rpartition(".")[0] == module)]
    return {name: [i for i, c in enumerate(statistics.components) if c == name] for name in names}


def _signed_log_axis(axes: Axes) -> None:
    """Logarithmic beyond ±1 and linear between: an excess may be negative."""
    axes.set_yscale("symlog", linthresh=1)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
