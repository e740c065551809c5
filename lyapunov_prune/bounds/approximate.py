"""Run a model with approximated matrices that record their own errors.

Inside `with approximate(model, …) as records:` the chosen matrices are replaced, so errors propagate through the model.
Every forward records, for each matrix and token, the error against `W` on its actual input and the bound of its
theorem. At the end of the block every module is restored bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from lyapunov_prune.arguments import Range
from lyapunov_prune.bounds.approx_linear import ApproxLinear, Record, Residuals
from lyapunov_prune.bounds.approximation import Approximation, approximation
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.products import Product, watched_products
from lyapunov_prune.forward.replacement import exchanged, with_parts
from lyapunov_prune.linalg import require_numbers, token_energy, widen
from lyapunov_prune.models.decoder import Decoder, InMemory, Streamable, takes_model
from lyapunov_prune.models.hooked import held, hooked, overridden
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection


class Records(dict[str, Record]):
    """The records by matrix name, valid inside and after the block of `installed` or `observing`.

    They are of `model`, whose matrices `chosen` approximates.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[Projection, Approximation], cache_radius: float = 0.0) -> None:
        super().__init__({p.name: Record(p, approximation) for p, approximation in chosen.items()})
        self.model, self.watched = model, True
        self.swaps: list[_Forward | _BareMatrix] = []
        by_module: dict[str, list[Record]] = {}
        for record in self.values():
            by_module.setdefault(record.projection.module, []).append(record)
        for name, of_module in by_module.items():
            module = model.get_submodule(name)
            if not of_module[0].projection.stack:
                self.swaps.append(_Forward(name, module, ApproxLinear(module, of_module, cache_radius)))
                continue
            for key in dict.fromkeys(r.projection.parameter for r in of_module):
                self.swaps.append(_BareMatrix(module, key, [r for r in of_module if r.projection.parameter == key]))

    @contextmanager
    def installed(self) -> Iterator[Records]:
        """`approximate`, for approximations by matrix."""
        with ExitStack() as stack:
            for swap in self.swaps:
                stack.enter_context(swap.installed())
            with self._watching_uncalled(exact=False):
                yield self
            self._take_probes()

    @contextmanager
    def observing(self) -> Iterator[Records]:
        """`observe`, for approximations by matrix."""
        watched = [(swap.module, swap.observe) for swap in self.swaps if isinstance(swap, _Forward)]
        with hooked(after=watched), self._watching_uncalled(exact=True):
            yield self
        self._take_probes()

    def _take_probes(self) -> None:
        for record in self.values():
            record.take_probes()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the exact model inside this block (which must lie inside that of `approximate`)."""
        with ExitStack() as stack:
            stack.callback(setattr, self, "watched", self.watched)
            self.watched = False
            for swap in self.swaps:
                stack.enter_context(swap.suspended())
            yield

    def _watching_uncalled(self, exact: bool) -> AbstractContextManager[None]:
        """Inside the block, record errors on the inputs of matrices whose module is not called.

        `exact`: the model runs with its own weights.
        """
        residuals = {name: r for swap in self.swaps for name, r in swap.by_product.items()}

        def seen(product: Product) -> None:
            if not self.watched or product.called or not product.x.numel():
                return
            x = product.x.detach().reshape(1, -1, product.x.shape[-1])
            residuals[product.name].account(x, x)
            y = widen(product.output.detach())
            for record in residuals[product.name].records if exact else ():
                rows = slice(record.projection.start, record.projection.stop)
                record.output += float((y[..., rows, :] if product.rows_are_features else y[..., rows]).square().sum())

        return watched_products(self.model, [record.projection for record in self.values()], seen)


Choice = torch.Tensor | Approximation | None
Radius = Annotated[float, Range(0, 1, below=True)]  # of a cache, as a share of the norm of an input
Approximations = Mapping[str, torch.Tensor | Approximation] | Callable[[Projection, torch.Tensor], Choice]


@takes_model
@contextmanager
def approximate(model: InMemory, approximations: Approximations, *, cache_radius: Radius = 0.0) -> Iterator[Records]:
    """Run `model` with some matrices approximated, and yield a record for each, by name.

    `approximations` maps names (`models.plain.find_projections`) to `Ŵ` (output × input), or is a function of a
    projection and its matrix that returns `Ŵ` or None. Matrices stacked in a bare parameter (experts) have no cache.
    Weights that a module multiplies by directly are approximated and recorded too, without a cache. At the end of the
    block the probes are taken and the model is restored; after an exception it is restored without probes.

    Raises LyapunovPruneError for an unknown name, a wrong shape, NaN, or a matrix that is approximated already.
    """
    with held(model.model), Records(model.model, _chosen(model, approximations), cache_radius).installed() as records:
        yield records


@takes_model
@contextmanager
def observe(model: Streamable, approximations: Approximations) -> Iterator[Records]:
    """Run `model` as it is and record what each approximation would do to the inputs of its matrix.

    Like `approximate`, but the model computes the same as before. For a streamed model, the layers of these matrices
    must be in memory when the block begins.
    """
    with held(model.model), Records(model.model, _chosen(model, approximations)).observing() as records:
        yield records


def _chosen(decoder: Decoder, approximations: Approximations) -> dict[Projection, Approximation]:
    """The approximations by matrix."""
    projections = {p.name: p for p in find_projections(decoder)}
    weights = {name: p.weight(decoder.model) for name, p in projections.items()}
    choices: Mapping[str, torch.Tensor | Approximation | None]
    if callable(approximations):
        choices = {name: approximations(p, weights[name]) for name, p in projections.items()}
    else:
        choices = approximations
    given = {name: choice for name, choice in choices.items() if choice is not None}
    for name, choice in given.items():
        shape = tuple((choice.weight if isinstance(choice, Approximation) else choice).shape)
        W = weights.get(name)
        if W is None or shape != W.shape:
            wanted = f"names like {next(iter(weights))}" if W is None else f"shape {tuple(W.shape)}"
            raise LyapunovPruneError(f"an approximation of {name} of shape {shape} fits no matrix; give {wanted}")
    found: dict[Projection, Approximation] = {}
    for name, choice in given.items():
        p, W = projections[name], weights[name]
        if not isinstance(choice, Approximation):
            require_numbers(W, name)
            require_numbers(choice, f"the approximation of {name}")
            choice = approximation(W, choice)
        found[p] = choice
    return found


class _Forward:
    """Installs an ApproxLinear as `module.forward`, which accelerate may have replaced already.

    `module.weight` becomes the approximation too, because Mamba multiplies by the weight of a module it never calls.
    """

    def __init__(self, name: str, module: nn.Module, replacement: ApproxLinear) -> None:
        self.name, self.module, self.replacement = name, module, replacement
        self.by_product = {name: replacement.residuals}

    @contextmanager
    def installed(self) -> Iterator[None]:
        self.exact: Any = self.module.forward, self.module._parameters["weight"]
        if isinstance(self.module.forward, ApproxLinear):
            raise LyapunovPruneError(f"{self.name} is approximated already; leave the other block first")
        with overridden(self.module, self.replacement), exchanged(self.module, "weight", self.replacement.parameter):
            yield

    @contextmanager
    def suspended(self) -> Iterator[None]:
        forward, weight = self.exact
        with overridden(self.module, forward), exchanged(self.module, "weight", weight):
            yield

    def observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        """A hook after the exact module: record what the approximation would have done, and the size of `W x`."""
        x = args[0] if args else kwargs["input"]
        x = x.reshape(-1, *x.shape[-2:]) if x.ndim > 1 else x.view(1, 1, -1)
        self.replacement.residuals.account(x, x)
        bias: Any = module.bias
        product = widen(output) if bias is None else widen(output) - widen(bias)
        for record in self.replacement.residuals.records:
            record.output += float(token_energy(product[..., record.projection.start : record.projection.stop]).sum())


class _BareMatrix:
    """Approximates the matrices stacked in a bare parameter; `by_product` holds the residual of each, by name."""

    def __init__(self, module: nn.Module, key: str, records: list[Record]) -> None:
        exact: Any = module._parameters[key]
        after = with_parts(module, key, {r.projection: r.approximation.weight for r in records})
        self.installed, self.suspended = (partial(exchanged, module, key, stored) for stored in (after, exact))
        self.by_product = {
            p.name: Residuals(p.rows(exact.detach()), p.rows(after.detach()), [r], cached=False)
            for p, r in ((r.projection, r) for r in records)
        }
