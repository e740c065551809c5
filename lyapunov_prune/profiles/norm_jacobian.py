"""What the norm in front of attention takes out of an error: the Jacobian of LayerNorm and RMSNorm, and its share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Seed, checked
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.forward.hooks import residual_stream, run_backbone
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.forward.sublayers import find_sublayers
from lyapunov_prune.linalg import lift, token_energy
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.profiles.propagation import perturbed, required
from lyapunov_prune.progress import track
from lyapunov_prune.results.arrays import require_array
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

# Entries of the state that a norm is tried on: the ε under its root plays no part there, and float16 holds the squares.
_LARGE = 16.0


@checked
def norm_jacobian(
    x: torch.Tensor, weight: torch.Tensor | None = None, *, centred: bool = True, epsilon: float = 0.0
) -> torch.Tensor:
    """The Jacobian (d × d, float64) of LayerNorm at `x` (d,), or of RMSNorm where not `centred`.

    `J = diag(γ) (I − 11ᵀ/d − x̂x̂ᵀ/d) / σ`, `x̂ = (x − μ)/σ`, `σ² = mean (x − μ)² + ε` (structural sensitivity, eq. 3);
    RMSNorm has `μ = 0` and no `11ᵀ/d`. With γ = 1 and ε = 0 it projects out the mean and the radial direction and
    multiplies the rest by `1/σ`, which is its spectral norm (d > 2); with γ that lies between the third largest
    `|γ_i|/σ` (RMSNorm: the second) and the largest. `exact_norm(J)` is it.

    Raises LyapunovPruneError unless `x` is a finite vector that varies (RMSNorm: is not zero).
    """
    if x.ndim != 1 or not x.isfinite().all():
        raise LyapunovPruneError(f"a norm's Jacobian is taken at one finite state (d,), not {tuple(x.shape)}")
    x = lift(x)
    d = len(x)
    shifted = x - x.mean() if centred else x
    sigma = (shifted.square().mean() + epsilon).sqrt()
    if not sigma > 0:
        raise LyapunovPruneError("a norm has no Jacobian at a state without spread; give another state or its epsilon")
    unit = shifted / sigma
    J = torch.eye(d, dtype=x.dtype, device=x.device) - torch.outer(unit, unit) / d
    if centred:
        J -= 1 / d
    return (J if weight is None else lift(weight).unsqueeze(1) * J) / sigma


@dataclass(frozen=True)
class NormProjection(Result):
    """What the norm that feeds the attention of each layer takes out of a travelling error, float64, (L,).

    `mean` and `radial` are the shares of `Σ_t ‖e_t‖²` along `1` and along the state (less its mean where the norm is
    `centred`): what the Jacobian of the norm removes is their sum, and of RMSNorm `radial` alone. A random direction
    has `1/d` in each (`chance`). `stretch` is `max_i |γ_i| / σ_t`, the median over tokens: the spectral norm of the
    Jacobian, up to its two missing directions. NaN for a layer whose attention no norm feeds.
    """

    centred: tuple[bool | None, ...]  # LayerNorm; None where there is no norm
    mean: np.ndarray
    radial: np.ndarray
    stretch: np.ndarray
    chance: float
    measured_on: MeasuredOn

    def __post_init__(self) -> None:
        for name in ("mean", "radial", "stretch"):
            shape = (self.measured_on.model.num_layers,)
            require_array(f"what a norm removes, {name}", getattr(self, name), shape, finite=False)

    @property
    def removed(self) -> np.ndarray:
        """The share of the error's energy that the norm projects out, (L,)."""
        return self.radial + np.where([bool(c) for c in self.centred], self.mean, 0)

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "layer": np.arange(len(self.mean)),
                "mean": self.mean,
                "radial": self.radial,
                "removed": self.removed,
                "stretch": self.stretch,
            }
        )

    def headline(self) -> str:
        kinds = {True: "mean and radial direction", False: "radial direction"}
        removing = " or ".join(dict.fromkeys(kinds[c] for c in self.centred if c is not None))
        return (
            f"Share of the error's energy that the norm before attention projects out ({removing}): median "
            f"{np.nanmedian(self.removed):.3g}, {np.nanmin(self.removed):.3g} to {np.nanmax(self.removed):.3g}; "
            f"one random direction {self.chance:.3g}\n{self.measured_on.line()}"
        )


@checked
@in_eval_mode
@torch.no_grad()
def norm_projection(
    model: PreTrainedModel,
    batch: Readable,
    *,
    epsilon: float = 1e-2,
    seeds: Iterable[Seed] = range(2),
    batch_size: int = 1,
) -> NormProjection:
    """Measure how much of the error of `measure_contraction` lies where the next norm projects it out.

    Structural sensitivity, §6.2: LayerNorm "projects out the mean and radial components". Which of the two a norm
    removes, and its γ, are found by trying it, not by its class.

    Raises LyapunovPruneError where no norm feeds any attention (OLMo 2) or the arguments cannot be, and NonFiniteError.
    """
    reading = read(model, batch)
    structure, seeds = reading.structure, required(seeds, epsilon, batch_size)
    L = structure.num_layers
    attention = [found.branches.get("attention") for _, found in sorted(find_sublayers(model, range(L)).items())]
    tried = [None if branch is None else _tried(branch.entry, branch.x) for branch in attention]
    if not any(tried):
        raise LyapunovPruneError(
            f"no norm stands between the residual stream and the attention of {type(model).__name__}; "
            "its norms come behind, and project nothing out of what enters a layer"
        )
    sums, sigmas = np.zeros((3, L)), [list[torch.Tensor]() for _ in range(L)]

    for number, ids in enumerate(track(reading.windows(batch_size), "what norms remove")):
        windows = len(ids)

        def visit(layer: int, hidden: torch.Tensor, windows: int = windows) -> None:
            norm = tried[layer] if layer < L else None
            if norm is None:
                return
            if not hidden.isfinite().all():
                raise NonFiniteError(layer, reading.batch.text)
            clean, others = lift(hidden[:windows]), lift(hidden[windows:])
            error = others - clean.repeat(len(seeds), 1, 1)
            state = clean - clean.mean(-1, keepdim=True) if norm[0] else clean
            along = torch.nn.functional.normalize(state, dim=-1).repeat(len(seeds), 1, 1)
            parts = error.sum(-1).square() / error.shape[-1], (along * error).sum(-1).square(), token_energy(error)
            sums[:, layer] += [float(part.sum()) for part in parts]
            sigmas[layer].append(state.square().mean(-1).sqrt().flatten().cpu())

        with residual_stream(structure, visit, perturbed(windows, number * batch_size, seeds, epsilon)):
            run_backbone(structure, ids.repeat(1 + len(seeds), 1))
    stretch = [
        norm[1] / float(torch.cat(s).median()) if norm else np.nan for norm, s in zip(tried, sigmas, strict=True)
    ]
    with np.errstate(invalid="ignore"):
        mean, radial = sums[:2] / sums[2]
    return NormProjection(
        centred=tuple(norm[0] if norm else None for norm in tried),
        mean=mean,
        radial=radial,
        stretch=np.array(stretch),
        chance=1 / next(branch.x.shape[-1] for branch in attention if branch is not None),
        measured_on=reading.measured_on(seed=seeds[0]),
    )


def _tried(module: nn.Module, like: torch.Tensor) -> tuple[bool, float] | None:
    """Whether a norm removes the mean, and `max |γ_i|`; None for a module that is no norm. By what it does to `±c`."""
    if any(parameter.ndim > 1 for parameter in module.parameters()):
        return None
    x = torch.full_like(like[..., :1, :], _LARGE)
    x[..., ::2] *= -1
    y = module(x)
    if not torch.allclose(module(2 * x), y, rtol=1e-2):
        return None
    weight = (y - module(-x)).abs() / 2  # a bias cancels
    return torch.allclose(module(x + _LARGE), y, rtol=1e-2, atol=1e-3), float(weight.max())
