"""One-shot compression of every matrix of a model: a method, how much of each, and what came of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import Allocation, Matrices
from lyapunov_prune.allocation.schedules import allocate
from lyapunov_prune.allocation.table import SCHEDULES, Schedule, require_parameters
from lyapunov_prune.arguments import checked
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.checkpoints.cards import as_text
from lyapunov_prune.compression.held_out import HeldOutLoss
from lyapunov_prune.compression.masks import Pattern, as_pattern
from lyapunov_prune.compression.methods import compressed, rank_for
from lyapunov_prune.compression.table import METHODS, Method
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.plain import require_unquantised
from lyapunov_prune.models.projections import Projection, find_projections
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.profiles.contraction import ContractionProfile
from lyapunov_prune.progress import track
from lyapunov_prune.results.history import add_step
from lyapunov_prune.results.result import MeasuredOn, Result

REPORT = "compression.json"  # beside the weights of a compressed checkpoint


@dataclass(frozen=True)
class CompressedMatrix:
    """What became of one matrix (m × n).

    `zeros`: share of its entries that are zero. `rank`, `bits`: what was kept, None where the method keeps the other.
    `weight_error = ‖W − Ŵ‖_F / ‖W‖_F`; `output_error = ‖(W − Ŵ) X‖_F / ‖W X‖_F` on the calibration inputs X, None
    where no Gram matrix was collected.
    """

    name: str
    layer: int
    component: str
    rows: int
    columns: int
    amount: float
    zeros: float
    rank: int | None
    bits: float | None
    weight_error: float
    output_error: float | None


@dataclass(frozen=True)
class Packed:
    """The weight files of a checkpoint whose rounded matrices are stored as integers, and what they would be dense."""

    format: str
    bytes: int
    dense_bytes: int

    def line(self) -> str:
        return (
            f"packed integers ({self.format}): {self.bytes / 1e6:,.1f} MB of weights on disk, "
            f"{self.bytes / self.dense_bytes:.3f} of the {self.dense_bytes / 1e6:,.1f} MB that dense ones take; "
            "transformers unpacks them on the first forward, so without a kernel for them no time is saved"
        )


@dataclass(frozen=True)
class CompressionReport(Result):
    """A compression: its method, its allocation, and every matrix.

    `calibration` is what the method went by, None for one that looks at weights alone; `allocation.measured_on` what
    decided how much of each matrix.
    """

    method: str
    pattern: tuple[int, ...] | None
    group_size: int | None
    allocation: Allocation
    matrices: tuple[CompressedMatrix, ...]
    calibration: MeasuredOn | None
    symmetric: bool = False  # grids around 0, without a zero point
    packed: Packed | None = None  # None: dense matrices

    def about(self) -> str:
        """What a model card says of it."""
        calibration = self.calibration.line() if self.calibration else "none, the method looks at weights alone"
        allocation = "".join(f"\n\nAllocation: by {as_text(on.line())}." for on in self.allocation.measured_on)
        schedule = self.allocation.schedule
        told = [_told(self.method, METHODS[self.method])]
        told += [_told(schedule, SCHEDULES[schedule])] if schedule in SCHEDULES else []  # a file may name another
        return (
            f"{as_text(self.headline())}. The model has not been trained afterwards. `{REPORT}` lists every matrix.\n\n"
            f"{as_text('; '.join(told))}.\n\n"
            f"Calibration: {as_text(calibration)}.{allocation}"
        )

    @property
    def saw(self) -> tuple[MeasuredOn, ...]:
        """The texts that had a part in it."""
        return self.allocation.measured_on + ((self.calibration,) if self.calibration else ())

    @property
    def zeros(self) -> float:
        """Share of the entries of all matrices that are zero."""
        return float(np.average([m.zeros for m in self.matrices], weights=self._sizes()))

    def _sizes(self) -> list[int]:
        return [m.rows * m.columns for m in self.matrices]

    def to_frame(self) -> pd.DataFrame:
        """One row a matrix."""
        frame = pd.DataFrame([vars(m) for m in self.matrices])
        return frame.dropna(axis=1, how="all")

    def summary(self) -> pd.DataFrame:
        """One row a layer: means weighted by entries, errors as root mean squares."""
        frame = self.to_frame().assign(size=self._sizes())
        rows = []
        for layer, part in frame.groupby("layer"):
            row = {"layer": layer, self.allocation.unit: np.average(part["amount"], weights=part["size"])}
            row["zeros"] = np.average(part["zeros"], weights=part["size"])
            for error in ("weight_error", "output_error"):
                if error in part:
                    row[error] = float(np.sqrt((part[error] ** 2).mean()))
            rows.append(row)
        return pd.DataFrame(rows)

    def headline(self) -> str:
        extra = f" {self.pattern[0]}:{self.pattern[1]}" if self.pattern else ""
        extra += f", groups of {self.group_size}" if self.group_size else ""
        extra += ", symmetric" if self.symmetric else ""
        stored = self.packed.line() if self.packed else "dense matrices: neither memory nor time is saved"
        return (
            f"{self.method}{extra}, {self.allocation.headline()}: {self.zeros:.1%} of the entries are zero. Stored as "
            f"{stored}"
        )


def _told(name: str, entry: Method | Schedule) -> str:
    return f"{name}: {entry.help} ({entry.reference})"


@dataclass(frozen=True)
class Compressed:
    """A compressed model (plain: same class, same shapes) and what was done to it."""

    model: PreTrainedModel
    report: CompressionReport


@checked
@in_eval_mode
def compress(
    model: PreTrainedModel,
    batch: Readable | None = None,
    *,
    method: str,
    sparsity: float | None = None,
    rank: int | None = None,
    bits: float | None = None,
    allocation: str | Allocation = "uniform",
    profile: ContractionProfile | None = None,
    schedule_options: Mapping[str, Any] | None = None,
    pattern: Pattern | str | None = None,
    group_size: int | None = None,
    symmetric: bool = False,
    batch_size: int = 1,
) -> Compressed:
    """A copy of `model` with every matrix of its layers compressed by `method` (`METHODS`).

    Give one of `sparsity` (share of the entries, for low rank of the parameters of the factors), `rank` or `bits`,
    and a schedule's name with its parameters in `schedule_options` (`{"least": 0.7}`), or an Allocation that says how
    much of each matrix. Methods that look at activations take them from `batch`, layer by layer, with the layers before
    already compressed (`streaming.py`). A matrix whose amount is 0 stays as it is. Embeddings and head are left alone.
    `pattern`, (2, 4) or `2:4`, keeps so many of so many inputs; its sparsity need not be given. `symmetric` lets `rtn`
    round to grids around 0 (`rtn.symmetric_grid`), which `packed.write_packed` can write as integers.

    Memory: a copy of the model, and the statistics of one layer. `atp-search` compresses once more a trial, on half the
    windows (`held_out.py`). Raises LyapunovPruneError for amounts and options
    that the method does not have, a missing text or profile, and matrices shared between layers.
    """
    require_unquantised(model)
    pattern = as_pattern(pattern)
    if pattern is not None and sparsity is None and isinstance(allocation, str):
        sparsity = 1 - pattern[0] / pattern[1]
    kind = require_amount(method, sparsity, rank, bits, allocation)
    require_options(allocation, schedule_options)
    schedule = allocation.schedule if isinstance(allocation, Allocation) else allocation
    if pattern is not None and schedule != "uniform":
        raise LyapunovPruneError("a pattern keeps the same share of every matrix; give allocation uniform with it")
    given = None if batch is None else read(model, batch)
    if isinstance(allocation, Allocation):
        allocation.require_model(model)
    else:
        amount = next(x for x in (sparsity, rank, bits) if x is not None)
        score = None
        if SCHEDULES[allocation].needs == "score" and given is not None:
            again = partial(compress, method=method, group_size=group_size, batch_size=batch_size)
            score = HeldOutLoss(given, lambda m, half, chosen: again(m, half, allocation=chosen).model, batch_size)
        allocation = _allocated(
            model, kind, amount, allocation, schedule_options or {}, batch=given, profile=profile, score=score
        )
    small = copy.deepcopy(model)
    projections = find_projections(small)
    wanted = dict(zip(allocation.names, allocation.amount.tolist(), strict=True))
    _require_apart(small, projections)
    done: dict[str, CompressedMatrix] = {}

    @torch.no_grad()
    def change(here: Sequence[Projection], statistics_by_name: dict[str, Statistics]) -> None:
        for p in here:
            amount = _amount(method, wanted[p.name], allocation.unit, p.weight(small).shape)
            W, statistics = p.weight(small), statistics_by_name.get(p.name)
            after = W.clone()
            if amount is not None:
                after = compressed(
                    method, W, statistics, amount, pattern=pattern, group_size=group_size, symmetric=symmetric
                )
            done[p.name] = _describe(p, method, W, after, statistics, wanted[p.name], amount)
            W.copy_(after)

    needs = METHODS[method].needs
    if needs == "nothing":
        for p in track(projections, f"compression, {method}"):
            change([p], {})
    else:
        if given is None:
            raise LyapunovPruneError(f"method {method} needs calibration text; give a batch, or method magnitude")
        stream(small, given, projections, needs, change, batch_size=batch_size)
    report = CompressionReport(
        method=method,
        pattern=pattern,
        group_size=group_size,
        symmetric=symmetric,
        allocation=allocation,
        matrices=tuple(done[p.name] for p in projections),
        calibration=None if needs == "nothing" or given is None else given.measured_on(),
    )
    add_step(small, "compress", report.saw, model)
    return Compressed(small, report)


def require_amount(
    method: str, sparsity: float | None, rank: int | None, bits: float | None, allocation: str | Allocation
) -> str:
    """The unit in which it is said how much; raises LyapunovPruneError unless one is, and the method has it."""
    if method not in METHODS:
        raise LyapunovPruneError(f"unknown method {method!r}; give one of {', '.join(METHODS)}")
    takes = {"sparsity": ("sparsity",), "rank": ("sparsity", "rank"), "bits": ("bits",)}[METHODS[method].amount]
    given = [name for name, x in (("sparsity", sparsity), ("rank", rank), ("bits", bits)) if x is not None]
    if isinstance(allocation, Allocation):
        if given:
            raise LyapunovPruneError(f"the allocation says how much; leave out {given[0]}")
        given = [allocation.unit]
    elif allocation not in SCHEDULES:
        raise LyapunovPruneError(f"unknown allocation {allocation!r}; give one of {', '.join(SCHEDULES)}, or a file")
    if len(given) != 1 or given[0] not in takes:
        wanted, got = " or ".join(takes), ", ".join(given) or "nothing"
        raise LyapunovPruneError(f"method {method} takes {wanted}, and nothing beside it; got {got}")
    shares = (
        {"uniform": given[0], "bits": "bits"}.get(allocation, "sparsity") if isinstance(allocation, str) else given[0]
    )
    if given[0] != shares:
        raise LyapunovPruneError(f"allocation {allocation} does not share out {given[0]}; give uniform")
    return given[0]


def require_options(allocation: str | Allocation, options: Mapping[str, Any] | None) -> None:
    """Raise LyapunovPruneError unless the schedule has these parameters; an Allocation has made use of its own."""
    if not isinstance(allocation, Allocation):
        require_parameters(allocation, options or {})
    elif options:
        raise LyapunovPruneError(f"the allocation is made; leave out {next(iter(options))}, or name a schedule")


def _allocated(
    model: PreTrainedModel, kind: str, amount: float, schedule: str, options: Mapping[str, Any], **measured: Any
) -> Allocation:
    if schedule == "uniform" and kind != "sparsity":
        matrices = Matrices.of(model)
        even = np.full(len(matrices.sizes), float(amount))
        return matrices.allocated("uniform", amount, even, {}, unit=kind)
    return allocate(model, schedule, amount, **measured, **options)


def _amount(method: str, amount: float, unit: str, shape: Sequence[int]) -> float | None:
    """What the method is called with; None for a matrix that stays as it is."""
    if METHODS[method].amount != "rank":
        return amount if unit == "bits" or amount > 0 else None
    if unit == "sparsity" and amount == 0:
        return None
    return float(min(rank_for(shape, amount) if unit == "sparsity" else amount, *shape))


def _describe(
    p: Projection,
    method: str,
    W: torch.Tensor,
    after: torch.Tensor,
    statistics: Statistics | None,
    wanted: float,
    amount: float | None,
) -> CompressedMatrix:
    E, before = lift(W - after), lift(W)
    gram = statistics.gram if statistics is not None else None
    kind = METHODS[method].amount
    return CompressedMatrix(
        name=p.name,
        layer=p.layer,
        component=p.component,
        rows=W.shape[0],
        columns=W.shape[1],
        amount=wanted,
        zeros=float(lift(after == 0).mean()),
        rank=int(amount) if kind == "rank" and amount is not None else None,
        bits=int(amount) if kind == "bits" and amount is not None else None,
        weight_error=_share((E * E).sum(), (before * before).sum()),
        output_error=None if gram is None else _share(((E @ gram) * E).sum(), ((before @ gram) * before).sum()),
    )


def _share(error: torch.Tensor, whole: torch.Tensor) -> float:
    return float((error.clamp(min=0) / whole).sqrt()) if whole > 0 else 0.0


def _require_apart(model: PreTrainedModel, projections: Sequence[Projection]) -> None:
    """Matrices that several layers share would be compressed once for each."""
    seen: dict[tuple[int, int, int | None], str] = {}
    for p in projections:
        W = getattr(model.get_submodule(p.module), p.parameter)
        first = seen.setdefault((id(W), p.start, p.expert), p.name)
        if first != p.name:
            raise LyapunovPruneError(f"{first} and {p.name} are one matrix; shared layers are not compressed")
