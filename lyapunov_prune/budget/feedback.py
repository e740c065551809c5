"""Rounding in blocks of columns, of which later ones make up for the errors of earlier ones (GPTQ)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.budget.cost import in_parts
from lyapunov_prune.budget.storage import Chosen, Storage
from lyapunov_prune.calibration.gram import damped
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.second_order import inverse_factor
from lyapunov_prune.forward.dealing import summed
from lyapunov_prune.forward.own_text import self_generated
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.how import Stored
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection

DAMPING = 0.5  # of the mean energy of an input: with less, so few tokens are fitted too closely to gain on other text


def fed_back(
    W: torch.Tensor,
    size: int,
    H: torch.Tensor,
    stored: Callable[[np.ndarray, slice], Stored],
    read: Callable[[Stored], np.ndarray],
) -> tuple[Stored, torch.Tensor]:
    """`W` (m × n) as it is stored, rounded block by block of `size` columns, and the numbers of that, float32.

    The blocks are taken by their energy, the largest first. A block `P_B` becomes what is `stored` for it (of the
    numbers, and of which columns they are), which is `read` as `Q_B`; the columns R of the blocks that are left become
    `P_R − (P_B − Q_B) ([(H_BR,BR)⁻¹]_BB)⁻¹ [(H_BR,BR)⁻¹]_BR`, from `P = W` on. Among all changes of R that leaves the
    least `tr((W − Q) H (W − Q)ᵀ)`, `H` (n × n, float64). With `UᵀU = H⁻¹` (`inverse_factor`) the factors are
    `U_BB⁻¹ U_BR`. Frantar et al., GPTQ (ICLR 2023, arXiv:2210.17323), where a block is one column.
    """
    n = W.shape[1]
    order = H.diagonal().view(-1, size).sum(1).argsort(descending=True, stable=True)
    columns = (size * order[:, None] + torch.arange(size, device=H.device)).flatten()
    U = inverse_factor(H[columns][:, columns])
    starts = range(0, n, size)
    own, left = [U[at : at + size, at : at + size] for at in starts], [U[at : at + size, at + size :] for at in starts]
    steps = [torch.linalg.solve_triangular(a, b, upper=True) for a, b in zip(own, left, strict=True)]

    def part(rows: slice) -> tuple[Stored, torch.Tensor]:
        P = W.detach()[rows].to(H)[:, columns]
        Q, blocks = torch.empty_like(P), dict[int, Stored]()
        for at, block, step in zip(starts, order.tolist(), steps, strict=True):
            here = slice(at, at + size)
            given = np.ascontiguousarray(P[:, here].float().cpu().numpy())
            blocks[block] = stored(given, slice(size * block, size * (block + 1)))
            Q[:, here] = torch.from_numpy(read(blocks[block])).to(Q)
            P[:, at + size :] -= (P[:, here] - Q[:, here]) @ step
        return _joined([blocks[k] for k in sorted(blocks)], 1), Q[:, columns.argsort()].float()

    parts, Q = zip(*in_parts(W, part), strict=True)
    return _joined(parts, 0), torch.cat(Q)


def _joined(parts: Sequence[Stored], dim: int) -> Stored:
    return tuple(torch.cat(each, dim) for each in zip(*parts, strict=True))


@dataclass(frozen=True, eq=False)
class OwnText:
    """A text that a model wrote, and the Gram matrix (float64) of what its head was given meanwhile."""

    reading: Reading
    head: torch.Tensor


def written_by_itself(reading: Reading, seed: int = 0) -> OwnText:
    """As many windows and tokens as `reading` has, written by the model: those of one text gain less on others.

    Raises as `self_generated`, for a model that names no token to begin with.
    """
    windows, context = reading.batch.ids.shape
    head: Any = reading.model.get_output_embeddings()
    width = 0 if head is None else head.weight.shape[1]
    gram = torch.zeros(width, width, dtype=torch.float64, device=reading.model.device)

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0][:, -1].double()
        gram.addmm_(x.T, x)

    with hooked(before=[] if head is None else [(head, add)]):
        own = self_generated(reading.decoder, tokens=windows * context, context=context, seed=seed)
    summed(reading.model, gram)
    return OwnText(read(reading.decoder, own), gram)


@torch.no_grad()
def fed_forward(own: OwnText, storage: Storage, chosen: Chosen, rounded: PreTrainedModel) -> Chosen:
    """`chosen` with the matrices of the layers and the head as they are stored with feedback (`fed_back`).

    `H` is the Gram matrix of a matrix's inputs on the tokens of `own`, with `DAMPING` times their mean energy on the
    diagonal. That of the head is of the model's own states, those of a layer with what is before it written already:
    `rounded`, a copy of the model that is rounded as `chosen`, becomes what is to be written. A head that is the
    embedding too moves both. Experts, embeddings by themselves, and types whose blocks are one number or a whole row
    stay as they are. Memory: the Gram matrices of one layer, and the bytes of the matrices.

    Raises as `calibration.streaming.stream`.
    """
    dense, found = own.reading.model, dict(chosen)

    def feeds(name: str) -> bool:
        return name in chosen and 1 < storage.block(chosen[name].kind) < dense.get_parameter(name).shape[1]

    def feed(name: str, gram: torch.Tensor) -> None:
        W, (kind, importance, _) = dense.get_parameter(name), chosen[name]
        H = damped(gram, DAMPING, W.device)
        stored, Q = fed_back(
            *(W, storage.block(kind), H),
            stored=lambda V, some: storage.stored(V, kind, importance[some]),
            read=lambda each: storage.read(each, kind),
        )
        found[name] = found[name]._replace(stored=stored)
        rounded.get_parameter(name).copy_(Q)

    def change(here: Sequence[Projection], statistics: Mapping[str, Statistics]) -> None:
        for name, p in projections.items():
            if p in here:
                gram = statistics[p.name].gram
                assert gram is not None
                feed(name, gram)

    head = getattr(dense.get_output_embeddings(), "weight", None)
    for name in [name for name, p in dense.named_parameters() if p is head and feeds(name)]:
        feed(name, own.head)
    projections: dict[str, Projection] = {}
    for p in find_projections(own.reading.decoder):
        name = f"{p.module}.{p.parameter}"
        if feeds(name) and not (p.stack or p.transposed):
            projections.setdefault(name, p)  # the parts of a fused matrix read one input
    if projections:
        stream(rounded, own.reading.batch, list(projections.values()), "gram", change)
    return found
