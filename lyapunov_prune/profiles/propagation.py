"""Follow an error through the layers: energies of state and error at every boundary.

Clean and perturbed rows pass the layers in one batch, and only sums over tokens are kept, so memory does not grow with
depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad

from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError, reported
from lyapunov_prune.forward.hooks import Inject, Visit, layer_input, residual_stream, run_backbone
from lyapunov_prune.linalg import token_energy, widen
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure

RESAMPLES = 2000
MOST_SEEDS = 1000
# Per layer: the module that the stream enters after its first sublayer.
Between = Mapping[int, nn.Module]
_NOTHING: Between = MappingProxyType({})


@dataclass(frozen=True)
class Energies:
    """Energies of state and error in each window; L + 1 boundaries, S seeds, W windows, float64.

    A measurement `between` sublayers has additional boundaries, in the order of the stream.
    """

    state: np.ndarray  # Σ_t ‖h‖², (L + 1, W)
    error: np.ndarray  # Σ_t ‖e‖², (L + 1, S, W)
    relative: np.ndarray  # mean_t ‖e‖²/‖h‖², (L + 1, S, W)

    def energy(self, pooling: str) -> np.ndarray:
        if pooling == "token":
            return self.relative.mean((-2, -1))
        return self.error.mean(-2).sum(-1) / self.state.sum(-1)

    def drawn(self, pooling: str) -> np.ndarray:
        """Bootstrap samples of ρ over windows and seeds, drawn independently, (RESAMPLES, L)."""
        _, seeds, windows = self.error.shape
        rng = np.random.default_rng(0)
        a = drawn_windows(windows, rng)
        b = rng.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
        # V is (resamples, L + 1); the draws enter as weights of the sums.
        if pooling == "token":
            energy = np.einsum("rw,rs,lsw->rl", a / windows, b, self.relative, optimize=True)
        else:
            energy = np.einsum("rw,rs,lsw->rl", a, b, self.error, optimize=True) / (a @ self.state.T)
        with np.errstate(divide="ignore", invalid="ignore"):  # no error left to grow
            return energy[:, 1:] / energy[:, :-1]

    def interval(self, pooling: str) -> np.ndarray:
        """Percentile bootstrap of ρ, 95 %, (L, 2); NaN for one window and one seed."""
        _, seeds, windows = self.error.shape
        if seeds * windows == 1:
            return np.full((len(self.state) - 1, 2), np.nan)
        return np.quantile(self.drawn(pooling), [0.025, 0.975], axis=0).T


def drawn_windows(windows: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Bootstrap counts: how often each window is drawn, (RESAMPLES, windows).

    Without `rng` the samples depend only on the number of windows, so that two measurements share them.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    return rng.multinomial(windows, np.full(windows, 1 / windows), RESAMPLES)


def drawn_means(values: np.ndarray) -> np.ndarray | None:
    """Bootstrap means of `values` (n, windows) over windows, (RESAMPLES, n); None for a single window."""
    windows = values.shape[-1]
    return None if windows == 1 else drawn_windows(windows) @ values.T / windows


@dataclass(frozen=True)
class WindowSums(Energies):
    """`Energies`, and those of the token with the largest state."""

    peak_state: np.ndarray  # max_t ‖h‖², (L + 1, W)
    peak_error: np.ndarray  # ‖e‖² of that token, (L + 1, S, W)

    @classmethod
    def join(cls, parts: list[WindowSums]) -> WindowSums:
        """The windows of all parts, in order."""
        return cls(*(np.concatenate(same, axis=-1) for same in zip(*(vars(p).values() for p in parts), strict=True)))

    def copies(self, chosen: slice) -> WindowSums:
        """The same for some of the perturbed copies."""
        error, relative, peaks = (x[:, chosen] for x in (self.error, self.relative, self.peak_error))
        return WindowSums(self.state, error, relative, self.peak_state, peaks)

    def energies(self) -> Energies:
        """The energies without the peaks."""
        return Energies(self.state, self.error, self.relative)


def require_moved(error: float, epsilon: float) -> None:
    """Raise LyapunovPruneError if the `error` before layer 0 is zero because ε is below rounding."""
    if not error > 0:
        raise LyapunovPruneError(
            f"an epsilon of {epsilon:g} is below the rounding of the model and changes no state; give a larger one, "
            "as 1e-2"
        )


def listed(seeds: Iterable[int]) -> tuple[int, ...]:
    """The seeds; raises LyapunovPruneError for none, and for more than MOST_SEEDS: each is a row of every forward."""
    listed = tuple(map(int, islice(seeds, MOST_SEEDS + 1)))
    if not 0 < len(listed) <= MOST_SEEDS:
        raise LyapunovPruneError(f"give 1 to {MOST_SEEDS:,} seeds (intervals also use windows)")
    return listed


def direction(hidden: torch.Tensor, first_window: int, seed: int) -> torch.Tensor:
    """`‖h_t‖ u_t`, drawn per window so that it does not depend on the batch size."""
    rows = []
    for window in range(first_window, first_window + len(hidden)):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + window)
        rows.append(torch.randn(hidden.shape[1:], generator=generator))
    noise = torch.stack(rows).to(hidden.device)
    noise /= torch.linalg.vector_norm(noise, dim=-1, keepdim=True)
    return noise * torch.linalg.vector_norm(widen(hidden), dim=-1, keepdim=True)


def perturbed(windows: int, first_window: int, seeds: tuple[int, ...], epsilon: float | Sequence[float]) -> Inject:
    """`[clean; copy; …]` with one copy per seed, each moved by `ε ‖h_t‖ u_t`, with a common or its own ε."""
    each = np.broadcast_to(epsilon, len(seeds)).tolist()

    def inject(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        clean = widen(hidden[:windows])
        for k, (seed, size) in enumerate(zip(seeds, each, strict=True), start=1):
            moved = clean + size * direction(clean, first_window, seed)
            hidden[k * windows : (k + 1) * windows] = moved.to(hidden.dtype)
        return hidden

    return inject


def _reduce(state: torch.Tensor, errors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums over tokens at one boundary: `state` is (W, T), `errors` (S, W, T)."""
    peak_state, peak = state.max(-1)
    peak_error = errors.gather(-1, peak.expand(len(errors), -1).unsqueeze(-1)).squeeze(-1)
    # A token whose state is exactly zero counts with relative error 0.
    relative = torch.where(state > 0, errors / state, 0).mean(-1)
    return state.sum(-1), errors.sum(-1), relative, peak_state, peak_error


def _collect(rows: list[tuple[int, tuple[torch.Tensor, ...]]], where: str) -> WindowSums:
    boundaries, sums_of = zip(*rows, strict=True)
    sums = WindowSums(*(torch.stack([part.cpu() for part in parts]).numpy() for parts in zip(*sums_of, strict=True)))
    finite = np.isfinite(sums.state).all(-1) & np.isfinite(sums.error).all((-2, -1))
    if not finite.all():
        raise NonFiniteError(boundaries[int(np.argmin(finite))], where)
    return sums


def _run(structure: Structure, ids: torch.Tensor, visit: Visit, inject: Inject, between: Between = _NOTHING) -> None:
    """One forward inside `residual_stream`, with `visit(l + 1, h)` also where the stream enters `between[l]`."""
    shape: list[torch.Size] = []  # of the stream: OPT flattens tokens inside a layer

    def between_layers(boundary: int, hidden: torch.Tensor) -> None:
        shape[:] = [hidden.shape]
        visit(boundary, hidden)

    def inside(layer: int) -> Callable[..., None]:
        return lambda module, args, kwargs: visit(layer + 1, layer_input(args, kwargs).view(shape[0]))

    with (
        residual_stream(structure, between_layers, inject),
        hooked(before=[(module, inside(layer)) for layer, module in between.items()]),
    ):
        run_backbone(structure, ids)


def difference_sums(
    structure: Structure,
    ids: torch.Tensor,
    first_window: int,
    seeds: tuple[int, ...],
    epsilon: float | Sequence[float],
    between: Between = _NOTHING,
) -> WindowSums:
    """One forward over `[clean; perturbed by seed 0; …]`, reduced at every boundary; a common ε or one per seed."""
    windows = len(ids)
    rows: list[tuple[int, tuple[torch.Tensor, ...]]] = []

    def visit(layer: int, hidden: torch.Tensor) -> None:
        clean = widen(hidden[:windows])
        errors = [
            token_energy(widen(hidden[k * windows : (k + 1) * windows]) - clean) for k in range(1, len(seeds) + 1)
        ]
        rows.append((layer, _reduce(token_energy(clean), torch.stack(errors))))

    inject = perturbed(windows, first_window, seeds, epsilon)
    _run(structure, ids.repeat(1 + len(seeds), 1), visit, inject, between)
    return _collect(rows, f"windows {first_window} to {first_window + windows - 1}")


def jvp_sums(
    structure: Structure, ids: torch.Tensor, first_window: int, seeds: tuple[int, ...], epsilon: float
) -> WindowSums:
    """One forward of dual numbers: the primal is the clean state, the tangents are the directions."""
    windows = len(ids)
    rows: list[tuple[int, tuple[torch.Tensor, ...]]] = []

    def inject(hidden: torch.Tensor) -> torch.Tensor:
        clean = hidden[:windows]
        tangent = torch.cat([direction(clean, first_window, seed) for seed in seeds])
        return forward_ad.make_dual(hidden, tangent.to(hidden.dtype))

    def visit(layer: int, primal: torch.Tensor, tangent: torch.Tensor) -> None:
        errors = token_energy(widen(tangent)).view(len(seeds), windows, -1) * epsilon**2
        rows.append((layer, _reduce(token_energy(widen(primal[:windows])), errors)))

    _run_dual(structure, ids.repeat(len(seeds), 1), visit, inject)
    return _collect(rows, f"windows {first_window} to {first_window + windows - 1}")


def jvp_moved(structure: Structure, ids: torch.Tensor, first_window: int, unit: float) -> np.ndarray:
    """`Σ_t ‖ė'_t − ė_t‖²` and `Σ_t ‖h_t‖²` at every boundary, (2, L + 1): change of the derivative ė by rounding.

    ė' is the derivative in the same direction after moving the state before layer 0 by one `unit` of rounding. It is
    computed with a tangent three times as long, so that its own rounding is independent.
    """
    windows = len(ids)
    sums: list[tuple[float, float]] = []

    def inject(hidden: torch.Tensor) -> torch.Tensor:
        primal = perturbed(windows, first_window, (0,), unit)(hidden)
        tangent = direction(hidden[:windows], first_window, 0)
        return forward_ad.make_dual(primal, torch.cat([tangent, 3 * tangent]).to(hidden.dtype))

    def visit(layer: int, primal: torch.Tensor, tangent: torch.Tensor) -> None:
        one, other = (widen(part) for part in tangent.split(windows))
        moved, state = token_energy(other / 3 - one), token_energy(widen(primal[:windows]))
        sums.append((float(moved.sum()), float(state.sum())))

    _run_dual(structure, ids.repeat(2, 1), visit, inject)
    return np.array(sums).T


def _run_dual(
    structure: Structure, ids: torch.Tensor, visit: Callable[[int, torch.Tensor, torch.Tensor], None], inject: Inject
) -> None:
    """One forward of dual numbers in a `differentiable` model; `visit(l, primal, tangent)` at every boundary."""

    def unpacked(layer: int, hidden: torch.Tensor) -> None:
        primal, tangent = forward_ad.unpack_dual(hidden)
        assert tangent is not None, "the tangent was lost"
        visit(layer, primal, tangent)

    with forward_mode(structure), forward_ad.dual_level():
        _run(structure, ids, unpacked, inject)


def forward_mode(structure: Structure) -> AbstractContextManager[None]:
    """Inside the block, an operation without a forward-mode derivative raises LyapunovPruneError."""
    what = f"{type(structure.backbone).__name__} has an operation without a forward-mode derivative"
    remedy = "load it with attn_implementation eager, use method difference, or give a model without it"
    return reported(what, remedy, NotImplementedError)
