"""How much each sublayer stretches a small change of the residual stream at its input.

The paper measures that these operator norms are far above one, so contraction does not come from the sublayers but from
the growth of the state (structural sensitivity, §6.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from lyapunov_prune.forward.anatomy import anatomy_of
from lyapunov_prune.forward.branches import Branch
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.hooks import layer_input, require_finite_layers, run_backbone
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.models.device import eager_experts
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.plain import require_readable
from lyapunov_prune.profiles.propagation import forward_mode
from lyapunov_prune.report.drawing import COLOURS, GREY, log_axis, one_panel, over_depth
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.result import MeasuredOn, Result

# A new direction this small relative to the old one is rounding: the Krylov space is exhausted.
_EXHAUSTED = 1e-6
Product = Callable[[torch.Tensor], torch.Tensor]


_Norms = Annotated[np.ndarray, Per("layer", least=-np.inf, finite=False)]


@dataclass(frozen=True)
class JacobianNorms(Result):
    """Stretch of the two sublayers of every layer, float64, (L,). Lower estimates, not bounds.

    `J` is the derivative of a sublayer, `x ↦ f(LN(x))`, with respect to the residual stream of a whole window at its
    input (tokens · d to tokens · d), at the states of the text. `norm` is `‖J v‖ / ‖v‖` for the best `v` in a Krylov
    space of `steps` dimensions, the largest over windows; `rise` is the relative increase in the last step. `gain =
    ‖J‖_F / √(tokens · d)`, estimated from `probes` random vectors, is the stretch of a typical error.

    A layer with one sublayer has its numbers under attention and NaN under MLP.
    """

    steps: int
    probes: int
    attention_norm: _Norms
    attention_gain: _Norms
    attention_rise: _Norms
    mlp_norm: _Norms
    mlp_gain: _Norms
    mlp_rise: _Norms
    measured_on: MeasuredOn

    def headline(self) -> str:
        norms = np.concatenate([self.attention_norm, self.mlp_norm])
        norms = norms[~np.isnan(norms)]
        rise = np.nanmax([self.attention_rise, self.mlp_rise])
        return (
            f"Operator norms of the sublayers' Jacobians, lower estimates: {norms.min():.3g} to {norms.max():.3g}, "
            f"above 1 in {int((norms > 1).sum())} of {len(norms)} sublayers ({self.steps} steps; the last raised "
            f"none by more than {rise:.2g})\n{self.measured_on.line()}"
        )


@runs_model
def sublayer_jacobians(
    model: InMemory, batch: Readable, *, steps: int = 12, probes: int = 8, seed: int = 0
) -> JacobianNorms:
    """Estimate `‖J‖` and `‖J‖_F/√n` of attention and MLP of every layer, see JacobianNorms.

    `J v` is a forward-mode and `Jᵀ u` a reverse-mode derivative of the layer, called again with the arguments of the
    model's own call, one window at a time. Time: about `2 (3 · steps + probes)` forwards per window, so give few and
    short windows. Memory: the graph of one layer and `2 · steps` states of a window in float64.

    A sublayer begins where the residual stream enters its norm (or the sublayer itself, without a norm) and ends with
    its output, or with a norm that is applied to this output alone (Gemma). Residual multipliers of the layer (Granite)
    are not part of it. If the norm is applied to the stream itself (post-norm OPT), the MLP's norm is the one after
    attention.

    Raises LyapunovPruneError for fewer than two steps or one probe, ids outside the vocabulary, windows longer than the
    context, or an operation without forward-mode derivative, and NonFiniteError naming the layer for NaN.
    """
    reading = read(model, batch)
    text, structure = reading.batch.text, reading.structure
    require_readable(model)

    def stretches(number: int, ids: torch.Tensor) -> np.ndarray:
        rows: list[list[float]] = []
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)

        def measure(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index = len(rows)
            require_finite_layers(np.array([bool(layer_input(args, kwargs).isfinite().all())]), text, index)
            row: list[float] = []
            parts = anatomy_of(structure, index, args, kwargs).parts.values()
            for (branch,) in (part.branches for part in parts):  # none side by side
                with products(branch) as (forward, adjoint, size):
                    norm, rise = largest_stretch(forward, adjoint, _signs(size, generator), steps)
                    gains = [forward(_signs(size, generator)).square().sum() / size for _ in range(probes)]
                row += [norm, float(torch.stack(gains).mean()), rise]
            require_finite_layers(np.array([np.isfinite(row).all()]), text, index + 1)
            rows.append([*row, *[np.nan] * (6 - len(row))])

        with (
            forward_mode(structure),
            eager_experts(structure.backbone),
            hooked(before=[(layer, measure) for layer in structure.layers]),
        ):
            run_backbone(structure, ids)
        return np.array(rows)

    values = np.stack(dealt(reading, 1, stretches, "jacobians"))  # (windows, L, 6)
    highest, mean = values.max(0), values.mean(0)
    return JacobianNorms(
        steps=steps,
        probes=probes,
        attention_norm=highest[:, 0],
        attention_gain=np.sqrt(mean[:, 1]),
        attention_rise=highest[:, 2],
        mlp_norm=highest[:, 3],
        mlp_gain=np.sqrt(mean[:, 4]),
        mlp_rise=highest[:, 5],
        measured_on=reading.measured_on(seed=seed),
    )


def largest_stretch(forward: Product, adjoint: Product, start: torch.Tensor, steps: int) -> tuple[float, float]:
    """`max ‖J v‖/‖v‖` over the Krylov space of `JᵀJ` and `start` (n,), and its relative rise in the last step.

    Lanczos with full reorthogonalisation: the maximum over the Krylov space is at least that of power iteration with
    the same number of products. The images `J v` are kept, so the value is attained by a combination of measured
    products.
    """
    basis = torch.zeros(0, len(start), dtype=torch.float64)
    images: list[torch.Tensor] = []
    norms = [0.0]
    v = start
    for _ in range(steps):
        before = torch.linalg.vector_norm(v)
        for _ in range(2):  # reorthogonalise twice
            v = v - basis.T @ (basis @ v)
        size = torch.linalg.vector_norm(v)
        if not size > _EXHAUSTED * before:
            break
        basis = torch.cat([basis, (v / size).unsqueeze(0)])
        images.append(forward(basis[-1]))
        if not images[-1].isfinite().all():
            return np.nan, np.nan
        stacked = torch.stack(images)
        norms.append(float(torch.linalg.eigvalsh(stacked @ stacked.T)[-1].clamp_min(0).sqrt()))
        v = adjoint(images[-1])
    rise = norms[-1] / norms[-2] - 1 if len(norms) == steps + 1 and norms[-2] > 0 else 0.0
    return norms[-1], rise


@contextmanager
def products(branch: Branch) -> Iterator[tuple[Product, Product, int]]:
    """`v ↦ J v`, `u ↦ Jᵀ u` on flat float64 vectors, and the size of v."""
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward derivative
        x = branch.x.clone().requires_grad_()
        with torch.enable_grad():
            output = branch(x)

        def forward(v: torch.Tensor) -> torch.Tensor:
            with forward_ad.dual_level():
                result = branch(forward_ad.make_dual(x.detach(), v.to(x).view_as(x)))
                tangent = forward_ad.unpack_dual(result).tangent
            if tangent is None:
                raise NotImplementedError("the tangent was lost")
            return tangent.flatten().cpu().double()

        def adjoint(u: torch.Tensor) -> torch.Tensor:
            (gradient,) = torch.autograd.grad(output, x, u.to(output).view_as(output), retain_graph=True)
            return gradient.flatten().cpu().double()

        yield forward, adjoint, x.numel()


def _signs(size: int, generator: torch.Generator) -> torch.Tensor:
    """Random signs: `E ‖J s‖² = ‖J‖_F²` (Hutchinson)."""
    return torch.randint(2, (size,), generator=generator).double() * 2 - 1


def jacobian_figure(norms: JacobianNorms) -> str:
    """Largest and typical stretch of both branches over depth, on a logarithmic axis; 1 is drawn."""
    figure, axes = one_panel(9, 3.8)
    layers = np.arange(len(norms.attention_norm))
    for branch, label, colour, marker in (
        ("attention", "attention", COLOURS["rho"], "o"),
        ("mlp", "MLP", COLOURS["bi"], "s"),
    ):
        largest, typical = getattr(norms, f"{branch}_norm"), getattr(norms, f"{branch}_gain")
        axes.plot(layers, largest, marker=marker, markersize=4, color=colour, label=f"{label}, ‖J‖ from below")
        style: dict[str, Any] = {"marker": marker, "markersize": 4, "color": colour, "markerfacecolor": "white"}
        axes.plot(layers, typical, "--", label=f"{label}, ‖J‖_F/√n", **style)
    axes.axhline(1, color=GREY, linewidth=0.8)
    log_axis(axes)
    return over_depth(figure, axes, len(layers), "stretch of an error", ncols=2)
