"""A low-rank matrix as the product of two factors, and a model that holds the factors instead of the matrix.

Compression leaves a dense matrix Ŵ (m × n) of rank r, rounded to its dtype. Two factors hold `r (m + n)` numbers, which
is fewer than `m n` if `r < m n / (m + n)`. The compact format describes the factors of each matrix
(`models.modeling_compact.LowRank`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gram import scaled
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.compact import compact_copy, cuts_of
from lyapunov_prune.linalg import basis, lift
from lyapunov_prune.models.compact import compact_class
from lyapunov_prune.models.decoder import Decoder, InMemoryAny, Model, model_of, takes_model, wrap
from lyapunov_prune.models.plain import find_projections, require_weights
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.sharing import shared_memo
from lyapunov_prune.progress import track

Factors = tuple[torch.Tensor, torch.Tensor]


def two_factors(W: torch.Tensor, rank: int) -> Factors:
    """`L` (m × rank) and `R` (rank × n), in the dtype of `W` (m × n), whose product is `[W]_rank` (Eckart and Young).

    With Q the leading singular vectors of the shorter side, `L R = Q (Qᵀ W)` (of a tall `W`: `(W Q) Qᵀ`) in float64,
    Column i of L and row i of R are scaled to the same norm, then each factor is rounded once. If the rank of `W` is at
    most `rank`, `L R = W` up to rounding (`rounding_of`).
    """
    if W.shape[0] > W.shape[1]:
        L, R = two_factors(W.T, rank)
        return R.T.contiguous(), L.T.contiguous()
    D, exponent = scaled(lift(W.detach()))
    Q = basis(D).to(D.device)[:, -rank:].flip(1)
    # Eigenvectors of a Gram matrix lose directions below 1e-8 of the largest; two steps of iteration recover them.
    for _ in range(2):
        Q = torch.linalg.qr(D @ (D.T @ Q))[0]
    R = torch.ldexp(Q.T @ D, exponent)
    norms = torch.linalg.vector_norm(R, dim=1, keepdim=True)
    half = torch.where(norms > 0, norms, torch.ones_like(norms)).sqrt()
    return (Q * half.T).to(W), (R / half).to(W)


def rounding_of(W: torch.Tensor, factors: Factors) -> float:
    """An upper bound of `‖L R − W‖_F` for a `W` (m × n) of rank r whose entries were then rounded to its dtype.

    With u the unit roundoff of the dtype: `W` is within `u/(1 − u) ‖W‖_F` of a matrix of rank r, so `[W]_r` is at least
    as near to `W`. Rounding the factors adds `(2u + u²)/(1 − u)² ‖|L| |R|‖_F`, and the float64 arithmetic adds
    `4 (m + n) 2⁻⁵³ ‖W‖_F`. Subnormal entries round by more; the bound counts them with the least normal number.
    """
    L, R = (lift(factor).abs() for factor in factors)
    kind = torch.finfo(W.dtype)
    u, tiny = kind.eps / 2, kind.tiny * kind.eps / 2
    m, n = W.shape
    norm = float(lift(W).norm())
    spread = float((L @ R).norm())
    below = tiny * (m * n) ** 0.5 * (1 + float(L.sum(1).max() + R.sum(0).max()))
    return u / (1 - u) * norm + (2 * u + u * u) / (1 - u) ** 2 * spread + 4 * (m + n) * 2.0**-53 * norm + below


@dataclass(frozen=True, eq=False)
class Factored:
    """A matrix that is stored as factors: its module, and the place and rank of each run of its rows."""

    module: str
    runs: tuple[Projection, ...]
    ranks: tuple[int, ...]
    columns: int

    @property
    def form(self) -> str:
        """Its entry in config.json (`models.modeling_compact`)."""
        from lyapunov_prune.models.modeling_compact import LOW_RANK  # every family's code

        return " ".join([LOW_RANK, *(f"{m}:{r}" for m, r in zip(self.rows, self.ranks, strict=True))])

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of rows m_i of each run."""
        return tuple(p.stop - p.start for p in self.runs)

    @property
    def numbers(self) -> int:
        """How many numbers all factors hold: `Σ r_i (m_i + n)`."""
        return sum(r * (m + self.columns) for m, r in zip(self.rows, self.ranks, strict=True))

    @property
    def gone(self) -> int:
        """How many numbers the factors save against the dense matrix."""
        return sum(self.rows) * self.columns - self.numbers


def find_factored(model: Model, ranks: Mapping[str, int | None]) -> tuple[Factored, ...]:
    """The matrices of `model` that are smaller as factors, in order; `ranks` are by the name of a `Projection`.

    A fused matrix is split into its projections, each with its own rank. A rank of None leaves the matrix as it is, and
    experts that a family keeps as one tensor always stay. Raises LyapunovPruneError if factors make no matrix smaller,
    and for a model without a compact class (`models.compact`).
    """
    require_weights(model_of(model), "unquantised")
    compact_class(model_of(model))
    by_module: dict[str, list[Projection]] = {}
    for p in find_projections(wrap(model)):
        if p.expert is None:  # experts that are one tensor have no modules to replace
            by_module.setdefault(p.module, []).append(p)
    found = []
    for module, runs in by_module.items():
        n = runs[0].weight(model_of(model)).shape[1]
        kept = (ranks[p.name] for p in runs)
        least = tuple(min(n, p.stop - p.start, n if r is None else r) for p, r in zip(runs, kept, strict=True))
        factored = Factored(module, tuple(runs), least, n)
        if factored.gone > 0:
            found.append(factored)
    if not found:
        raise LyapunovPruneError(
            "no matrix is smaller as two factors; give a smaller rank, or leave out --format compact"
        )
    return tuple(found)


def require_smaller(model: PreTrainedModel, rank: int | None = None) -> None:
    """Raise LyapunovPruneError as `find_factored` would for this rank; None stands for a rank that is low enough."""
    find_factored(model, {p.name: rank or 1 for p in find_projections(wrap(model))})


@takes_model
@torch.no_grad()
def with_factors(model: InMemoryAny, ranks: Mapping[str, int | None]) -> PreTrainedModel:
    """The compact model that has `two_factors` in the place of each matrix of `model` that is smaller so.

    `ranks` go by the name of a `Projection`, as in `CompressionReport.ranks`. All other tensors share the memory of
    `model`, which stays unchanged. Raises as `find_factored`.
    """
    factored = find_factored(model, ranks)
    compact = with_places(model, factored)
    for each in track(factored, "factors"):
        compact.get_submodule(each.module).load_state_dict(factors_of(model.model, each), assign=True)
    return compact


def with_places(decoder: Decoder, factored: Sequence[Factored]) -> PreTrainedModel:
    """As `with_factors`, but the factors have no numbers yet: they are on the `meta` device."""
    from lyapunov_prune.models.modeling_compact import LowRank

    model, structure = decoder.model, decoder.structure
    cuts = [dict(places) for places in cuts_of(decoder)]
    modules: dict[int, nn.Module] = {}
    for each in factored:
        old = model.get_submodule(each.module)
        with torch.device("meta"):
            modules[id(old)] = LowRank.of(each.form, old).train(old.training)
        layer = each.runs[0].layer
        place = each.module.removeprefix(f"{structure.layers_path}.{layer}.")
        cuts[layer][place] = " ".join([*filter(None, [cuts[layer].get(place)]), each.form])
    compact = compact_copy(model, cuts, shared_memo(model) | modules)
    compact.cut([{} for _ in cuts])
    return compact


def factors_of(model: PreTrainedModel, each: Factored) -> dict[str, torch.Tensor]:
    """What `LowRank` holds in the place of `each`, by its names: `two_factors` of every run of rows, and its bias."""
    pairs = [two_factors(p.weight(model), r) for p, r in zip(each.runs, each.ranks, strict=True)]
    tensors = {"right.weight": torch.cat([R for _, R in pairs])}
    for i, ((L, _), p) in enumerate(zip(pairs, each.runs, strict=True)):
        tensors[f"left.{i}.weight"] = L
        if (bias := p.bias(model)) is not None:
            tensors[f"left.{i}.bias"] = bias.clone()
    return tensors
