"""Calibration statistics: sums over the inputs of matrices, and over gradients at their outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from transformers import PreTrainedModel

from lyapunov_prune.calibration.lending import Lender
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.dealing import dealt, summed
from lyapunov_prune.forward.hooks import run_backbone
from lyapunov_prune.forward.products import Product, watched_products
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.linalg import feature_energy, lift, require_numbers, token_energy
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.launched import alone
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.roles import why_unseen
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import in_eval_mode

# The remedy if the inputs of a matrix cannot be recorded; more text would not help.
_UNCALIBRATED = "use a method without calibration (--method magnitude, --allocation uniform)"


class Gathering:
    """Sums over the input tokens of `projections`, and over the gradients at their outputs.

    `needs` is `norms`, `gram`, `magnitudes` or `sensitivity`, as in `stream`. Matrices that get the same tensors share
    a sum. `weights` (by module, for the tokens of each of its calls in order) weight the tokens, or with `relative`
    `1/‖y_t‖²` of the matrix's output; sums are then not shared. `dense`, for the drift, holds by module the inputs in
    the dense model for the same tokens.

    Tokens of an expert are weighted by the square of the router's weight (`Statistics`). An expert that gets fewer
    tokens than its matrix has inputs is run on tokens of its layer as well (`Lender`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        projections: Sequence[Projection],
        needs: str,
        weights: Mapping[str, Iterator[torch.Tensor]] | None = None,
        dense: Mapping[str, list[torch.Tensor]] | None = None,
        *,
        relative: bool = False,
    ) -> None:
        self.model, self.projections, self.needs, self.weights, self.dense = model, projections, needs, weights, dense
        self.relative = relative
        self.energy: dict[str, torch.Tensor] = {}
        self.grams: dict[str, torch.Tensor] = {}
        self.drifts: dict[str, torch.Tensor] = {}
        self.magnitudes: dict[str, torch.Tensor] = {}
        self.sensitivities: dict[str, torch.Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._leader: dict[str, str] = {}  # the matrix whose sums this one shares
        self._calls: dict[str, list[int]] = {}  # numbers of the input tensors so far
        self._last: torch.Tensor | None = None
        self._number = 0  # of the last input tensor
        self._added: list[str] = []  # the matrices whose sums include the last tensor
        # A parameter shared by layers is called more often than other matrices, so its sums are its own.
        holders = {p.product: (p.stored(model), p.position) for p in projections}
        names = Counter(holders.values())
        self._alone = {name for name, holder in holders.items() if weights is not None or relative or names[holder] > 1}
        self._outputs: list[tuple[str, torch.Tensor, bool]] = []
        self._module = {p.product: p.routed for p in projections}
        self._inputs = {p.product: p.weight(model).shape[1] for p in projections if p.expert is not None}
        sizes: dict[str, int] = {}
        for name, inputs in self._inputs.items():
            sizes[self._module[name]] = max(inputs, sizes.get(self._module[name], 0))
        self._lenders = {module: Lender(model.get_submodule(module), size) for module, size in sizes.items()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, lender in self._lenders.items():
                stack.enter_context(lender.watching((self.weights or {}).get(module)))
            stack.enter_context(watched_products(self.model, self.projections, self._seen))
            yield

    def _seen(self, product: Product) -> None:
        name, x = product.name, product.x
        if not x.numel():  # an expert without tokens, which some families still call
            return
        if x is not self._last:
            self._last, self._added = x, []
            self._number += 1
        if self._leads(name):
            self._add(product, x.detach().reshape(-1, x.shape[-1]))
            self._added.append(name)
        self._calls.setdefault(name, []).append(self._number)
        if self.needs == "sensitivity":
            output = product.output if product.output.requires_grad else product.output.requires_grad_()
            self._outputs.append((name, output, product.rows_are_features))

    def _leads(self, name: str) -> bool:
        """Whether the current input of `name` has to be added to sums of its own."""
        leader = self._leader.get(name)
        if leader is None:
            alike = (o for o in self._added if o not in self._alone and self._calls[o] == [self._number])
            self._leader[name] = leader = name if name in self._alone else next(alike, name)
        if leader != name and leader not in self._added:  # their inputs differ from now on
            self._require_alike(name)
            self._leader[name] = name
            self._tokens[name] = self._tokens[leader]
            for sums in (self.energy, self.grams, self.magnitudes, self.drifts):
                if leader in sums:
                    sums[name] = sums[leader].clone()
        return self._leader[name] == name

    def _require_alike(self, name: str) -> None:
        leader = self._leader[name]
        if self._calls[name] != self._calls[leader]:
            raise LyapunovPruneError(
                f"{name} is given some of the inputs of {leader} and others too, and sums of both cannot be kept; "
                f"{_UNCALIBRATED}"
            )

    def _add(self, product: Product, x: torch.Tensor) -> None:
        name, root = product.name, self._roots(product, x)
        self._tokens[name] = self._tokens.get(name, 0) + len(x)
        if self.needs == "norms":
            energy = feature_energy(x) if root is None else root.square().mT @ lift(x).square()
            self._sum(self.energy, name, energy.reshape(-1))
            return
        rows = lift(x) if root is None else lift(x) * root
        if name in self.grams:
            self.grams[name].addmm_(rows.T, rows)
        else:
            self.grams[name] = rows.T @ rows
        if self.needs == "magnitudes":
            self._sum(self.magnitudes, name, rows.abs().sum(0))
        if self.dense is not None:
            calls = self.dense.get(name)
            before = lift(_of_tokens(name, x, calls.pop(0).flatten(0, -2) if calls else None))
            self._sum(self.drifts, name, ((before if root is None else before * root) - rows).T @ rows)

    def _roots(self, product: Product, x: torch.Tensor) -> torch.Tensor | None:
        """`√a_t` of the tokens `x` (tokens × 1); None if all are 1."""
        if product.routed is not None:
            rows, router = product.routed
            energy = self._lenders[self._module[product.name]].energy
            root = lift(router.detach()).abs()
            return (root if energy is None else root * energy.to(root.device)[rows].sqrt()).unsqueeze(1)
        if self.relative:
            y = product.output.detach()
            energy = token_energy(y.transpose(-1, -2) if product.rows_are_features else y).reshape(-1, 1)
            return torch.where(energy > 0, energy.rsqrt(), 0).to(x.device)
        if self.weights is None:
            return None
        return _of_tokens(product.name, x, next(self.weights[product.name], None)).sqrt().unsqueeze(1)

    @staticmethod
    def _sum(sums: dict[str, torch.Tensor], name: str, more: torch.Tensor) -> None:
        sums[name] = sums[name] + more if name in sums else more

    def differentiate(self, output: torch.Tensor, generator: torch.Generator) -> None:
        """Add the gradients at the matrices' outputs of the inner product of the layer's output with a random `v`."""
        # By window, so that the random numbers do not depend on the batch size.
        v = torch.stack([torch.randn(window.shape, generator=generator) for window in output]).to(output)
        self._back(output, v, [lender for lender in self._lenders.values() if lender.output is not None])

    @torch.enable_grad()
    def _back(self, output: torch.Tensor, v: torch.Tensor, lenders: Sequence[Lender] = ()) -> None:
        ends = [y for _, y, _ in self._outputs]
        ends += [lender.output for lender in lenders if lender.output is not None]
        grads = torch.autograd.grad(output, ends, v, allow_unused=True)
        for (name, _, rows_are_features), g in zip(self._outputs, grads, strict=False):
            if g is not None:
                self._sum(self.sensitivities, name, _gram(g.transpose(-1, -2) if rows_are_features else g))
        for lender, g in zip(lenders, grads[len(self._outputs) :], strict=True):
            lender.keep_gradient(g)
        self._outputs = []

    def _lend(self, held: Callable[[int], AbstractContextManager[None]]) -> None:
        """Run experts that got fewer tokens than inputs on tokens of their layer, which add nothing to the drift."""
        given, dense, self.dense = dict(self._tokens), self.dense, None
        few: dict[tuple[int, str, int], dict[int, int]] = {}  # tokens that each expert lacks, by input size
        lacking: dict[tuple[int, str, int], list[Projection]] = {}
        for p in self.projections:
            if p.expert is not None and self._lenders[p.routed].tokens:
                size = self._inputs[p.product]
                if (missing := size - self._sent(p)) > 0:
                    few.setdefault((p.layer, p.routed, size), {})[p.expert] = missing
                    lacking.setdefault((p.layer, p.routed, size), []).append(p)
        for place, missing_of in few.items():
            layer, routed, _ = place
            lender = self._lenders[routed]
            with held(layer), watched_products(self.model, lacking[place], self._seen):
                for output in lender.outputs(missing_of):
                    if self.needs == "sensitivity":
                        self._back(output, torch.cat(lender.gradients)[: len(output)])
        self._tokens, self.dense = given, dense

    def _sent(self, p: Projection) -> int:
        """The number of tokens that have entered the matrix."""
        return self._tokens.get(self._leader.get(p.product, p.product), 0)

    def statistics(
        self, held: Callable[[int], AbstractContextManager[None]] = lambda layer: nullcontext()
    ) -> dict[str, Statistics]:
        """The statistics of every matrix, by name; `held` brings the weights of a layer into memory.

        Processes that share the windows add their sums, unless one of `projections` `lends`.

        Raises LyapunovPruneError for a matrix without an observed product, and for activations that are not finite.
        """
        with torch.set_grad_enabled(self.needs == "sensitivity"):
            self._lend(held)
        for sums in (self.energy, self.grams, self.magnitudes, self.drifts):
            summed(self.model, *(sums[name] for name in sorted(sums)))
        result: dict[str, Statistics] = {}
        for p in self.projections:
            if p.product not in self._leader:
                raise LyapunovPruneError(
                    f"no product with {p.name} is seen in a forward of the calibration text: {why_unseen(p)}; "
                    f"{_UNCALIBRATED}"
                )
            self._require_alike(p.product)
            leader = self._leader[p.product]
            gram = self.grams.get(leader)
            energy = self.energy[leader] if gram is None else gram.diagonal()
            require_numbers(energy, f"energy of the inputs of {p.name} in the calibration")
            drift = self.drifts.get(leader)
            if self.dense is not None and drift is None and gram is not None:  # every token was lent
                drift = torch.zeros_like(gram)
            sensitivity = self.sensitivities.get(p.product)
            if sensitivity is not None:
                sensitivity = sensitivity[p.start : p.stop, p.start : p.stop]
            result[p.name] = Statistics(
                energy.sqrt(),
                gram,
                sensitivity,
                drift,
                self.magnitudes.get(leader),
                self._sent(p) if p.expert is not None else None,
            )
        return result


def lends(projections: Sequence[Projection]) -> bool:
    """Whether experts are among the matrices: they are lent tokens of all windows, which each process then runs."""
    return any(p.expert is not None for p in projections)


def _of_tokens(name: str, x: torch.Tensor, dense: torch.Tensor | None) -> torch.Tensor:
    """`dense`, from the dense model, on the device of `x`; LyapunovPruneError unless it has the same tokens."""
    if dense is None or len(dense) != len(x):
        raise LyapunovPruneError(
            f"{name} is not given the same tokens in the dense and in the compressed model, as an expert that they are "
            "routed to; leave out weighted and correction"
        )
    return dense.to(x.device)


def _gram(x: torch.Tensor) -> torch.Tensor:
    rows = lift(x.detach().reshape(-1, x.shape[-1]))
    return rows.T @ rows


@in_eval_mode
def input_norms(model: PreTrainedModel, batch: Readable, projections: Sequence[Projection]) -> dict[str, torch.Tensor]:
    """`‖x_j‖₂` over all tokens of `batch`, for each input feature j of each of `projections`, by name.

    In float64, from one forward of the model. Tokens of an expert are weighted by the router (`Statistics`). Raises
    LyapunovPruneError for a matrix that no token reaches, and for activations that are not finite.
    """
    reading = read(wrap(model), batch)
    gathering = Gathering(model, projections, "norms")
    with alone() if lends(projections) else nullcontext():
        with gathering.watching():
            dealt(reading, 1, lambda first, ids: run_backbone(reading.structure, ids), "calibration")
        found = gathering.statistics(partial(layer_held, model))
    return {name: statistics.norms.cpu() for name, statistics in found.items()}
