"""Every matrix of a model approximated, and every bound checked on every forward.

`check_bounds` takes one setting and follows the errors to the prediction; `check_grid` takes many settings
and shares what they have in common: the norm of W, the sparse stage, the basis of the low-rank stage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from lyapunov_prune.approx import Approximation, Record, approximate, approximation, certify_difference
from lyapunov_prune.bounds import BoundCheck, TokenCertificate
from lyapunov_prune.compression.lowrank import basis, truncate
from lyapunov_prune.compression.magnitude import sparsify
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.projections import Projection, find_projections
from lyapunov_prune.models.structure import find_structure, in_eval_mode
from lyapunov_prune.norms import CertifiedNorm, certify
from lyapunov_prune.progress import track
from lyapunov_prune.results import MeasuredOn, Result
from lyapunov_prune.text import TokenBatch, as_batch
from lyapunov_prune.tracing import run_backbone
from lyapunov_prune.trajectory import Trajectory

A = TypeVar("A")
B = TypeVar("B")

SPARSITIES = (0.0, 0.3, 0.5, 0.7, 0.9)
RANKS = (None, 32, 8)
CACHE_RADII = (0.0, 0.1)


@dataclass(frozen=True)
class Setting:
    """The three stages: share of entries removed, rank kept (None: all), radius of the cache as a share of ‖x‖."""

    sparsity: float
    rank: int | None
    cache_radius: float

    def __str__(self) -> str:
        return f"sparsity {self.sparsity:g}, rank {self.rank or 'full'}, cache radius {self.cache_radius:g}"


@dataclass(frozen=True)
class Violation:
    setting: Setting
    check: BoundCheck


@dataclass(frozen=True)
class BoundsReport(Result):
    """What came of checking every matrix (M) under every setting (K).

    `ratio` (K, M) is the largest error / bound of any token, NaN where none was seen (experts that a family
    fuses); `attained` (K, M) the same for the direction that the residual stretches most, near 1 when the
    bound is tight. `composition` and `decisions` come with a single setting only.
    """

    method: str
    settings: tuple[Setting, ...]
    names: tuple[str, ...]
    components: tuple[str, ...]
    layers: tuple[int, ...]
    theorems: tuple[str, ...]  # checked, of Theorems 1 to 4
    ratio: np.ndarray
    attained: np.ndarray
    hits: int  # inputs answered by the cache, over all matrices
    inputs: int  # inputs checked, over all matrices
    violations: tuple[Violation, ...]
    composition: tuple[BoundCheck, ...]
    decisions: TokenCertificate | None
    measured_on: MeasuredOn

    @property
    def checks(self) -> int:
        """Matrices times settings."""
        return len(self.names) * len(self.settings)

    @property
    def passed(self) -> bool:
        certified = () if self.decisions is None else self.decisions.violations
        return not self.violations and not certified and all(c.holds for c in self.composition)

    def to_frame(self) -> pd.DataFrame:
        """One row a matrix, the worst over all settings."""
        bad = [v.check.matrix for v in self.violations]
        return pd.DataFrame(
            {
                "matrix": self.names,
                "layer": self.layers,
                "component": self.components,
                "worst_ratio": np.fmax.reduce(self.ratio, axis=0),
                "attained": np.fmax.reduce(self.attained, axis=0),
                "violations": [bad.count(name) for name in self.names],
            }
        )

    def headline(self) -> str:
        lines = [
            f"Bounds: {len(self.names)} matrices × {len(self.settings)} settings = {self.checks} checks on "
            f"{self.inputs} inputs, {len(self.violations)} violations ({', '.join(self.theorems)})",
            self.measured_on.line(),
        ]
        lines += [f"VIOLATION at {v.setting}: {v.check}" for v in self.violations]
        if self.composition:
            last = self.composition[-1]
            lines.append(
                f"After the last layer: error {last.error:.4g}, composed estimate {last.bound:.4g} "
                "(trajectory_error_le with growth measured along this trajectory, no worst case)"
            )
        if self.decisions is not None:
            lines.append(self.decisions.headline())
        return "\n".join(lines)

    def summary(self) -> pd.DataFrame:
        """A line a component."""
        frame = self.to_frame().groupby("component", sort=False)
        columns: Any = {"matrices": ("matrix", "size"), "worst_ratio": ("worst_ratio", "max")}
        return frame.agg(**columns, attained=("attained", "min"), violations=("violations", "sum")).reset_index()


@in_eval_mode
@torch.no_grad()
def check_bounds(
    model: PreTrainedModel,
    batch: TokenBatch | torch.Tensor,
    *,
    method: str = "magnitude",
    sparsity: float = 0.5,
    rank: int | None = None,
    cache_radius: float = 0.0,
    batch_size: int = 1,
) -> BoundsReport:
    """Approximate every matrix of every layer and check its bound on every token (Theorems 1 to 4).

    `method="magnitude"` zeroes the share `sparsity` of the smallest entries; with `rank`, what is left is
    truncated to that rank; with `cache_radius`, tokens within that share of their norm reuse an earlier
    token's product. Errors travel on; they are composed layer by layer (`trajectory_error_le`, an estimate)
    and followed to the prediction (`argmax_unchanged_of_state_error`). A reported violation is one by
    `violation_is_real`, and by `no_false_alarm` rounding alone reports none.

    Raises LyapunovPruneError for a bad setting or batch, or NaN on the way.
    """
    batch = as_batch(model, batch)
    setting = Setting(float(sparsity), rank, float(cache_radius))
    _require(method, [setting])
    projections = find_projections(model)
    structure = find_structure(model)
    weights = {p.name: p.weight(model) for p in projections}
    chosen = _each(partial(_approximate_one, setting=setting), weights, "certified norms")
    with approximate(model, chosen, cache_radius=setting.cache_radius) as records:
        trajectory = Trajectory(model, structure, records)
        for start in track(range(0, len(batch.ids), batch_size), "bounds"):
            trajectory.follow(batch.ids[start : start + batch_size].to(model.device))
    return _report(
        method, projections, [setting], [dict(records)], trajectory.composition(), trajectory.decisions(), model, batch
    )


@in_eval_mode
@torch.no_grad()
def check_grid(
    model: PreTrainedModel,
    batch: TokenBatch | torch.Tensor,
    *,
    method: str = "magnitude",
    sparsities: Sequence[float] = SPARSITIES,
    ranks: Sequence[int | None] = RANKS,
    cache_radii: Sequence[float] = CACHE_RADII,
    batch_size: int = 1,
) -> BoundsReport:
    """`check_bounds` for every combination of sparsity × rank × cache radius: thirty by default.

    Norms and decompositions are computed once for each matrix and reused. By default the settings hold every
    one of Theorems 1 to 4, and one that changes nothing, whose error must be exactly zero. Alarms mean what
    `no_false_alarm` and `violation_is_real` say. Memory: two copies of the layers beside the model.
    """
    batch = as_batch(model, batch)
    settings = [Setting(float(s), r, float(c)) for s in sparsities for r in ranks for c in cache_radii]
    _require(method, settings)
    projections = find_projections(model)
    weights = {p.name: p.weight(model) for p in projections}
    norms = _each(certify, weights, "norms of the weights")
    known = {name: (weights[name], norms[name]) for name in weights}
    outcomes: list[dict[str, Record]] = []
    for sparsity in sparsities:
        stage = partial(_sparse_stage, sparsity=sparsity, with_basis=any(rank is not None for rank in ranks))
        stages = _each(stage, known, f"sparsity {sparsity:g}")
        for rank in ranks:
            chosen = _each(partial(_approximate, rank=rank), stages, f"sparsity {sparsity:g}, rank {rank or 'full'}")
            outcomes += [_outcome(model, batch, chosen, radius, batch_size) for radius in cache_radii]
            chosen.clear()
    return _report(method, projections, settings, outcomes, (), None, model, batch)


def _outcome(
    model: PreTrainedModel, batch: TokenBatch, chosen: dict[str, Approximation], cache_radius: float, batch_size: int
) -> dict[str, Record]:
    """The records of one setting, without their weights."""
    structure = find_structure(model)
    with approximate(model, chosen, cache_radius=cache_radius) as records:
        for start in range(0, len(batch.ids), batch_size):
            run_backbone(structure, batch.ids[start : start + batch_size])
    return {name: _without_weights(record) for name, record in records.items()}


def _each(work: Callable[[A], B], items: Mapping[str, A], description: str) -> dict[str, B]:
    """`work` of every matrix, one matrix a core: most are too small for several cores to share one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {name: pool.submit(work, item) for name, item in items.items()}
            return {name: future.result() for name, future in track(list(futures.items()), description)}
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class _Stage:
    """What every rank at one sparsity has in common."""

    W: torch.Tensor
    norm: CertifiedNorm
    S: torch.Tensor
    removed: CertifiedNorm  # ‖W − S‖
    basis: torch.Tensor | None


def _sparse_stage(known: tuple[torch.Tensor, CertifiedNorm], sparsity: float, with_basis: bool) -> _Stage:
    W, norm = known
    S = sparsify(W, sparsity)
    return _Stage(W, norm, S, certify_difference(W, S), basis(S) if with_basis else None)


def _approximate(stage: _Stage, rank: int | None) -> Approximation:
    L = stage.S
    if rank is not None and stage.basis is not None:
        L = truncate(stage.S, rank, stage.basis)
    return approximation(stage.W, L, sparse=stage.S, weight=stage.norm, sparse_residual=stage.removed)


def _approximate_one(W: torch.Tensor, setting: Setting) -> Approximation:
    stage = _sparse_stage((W, certify(W)), setting.sparsity, with_basis=setting.rank is not None)
    return _approximate(stage, setting.rank)


def _require(method: str, settings: Sequence[Setting]) -> None:
    if method != "magnitude":
        raise LyapunovPruneError(f"unknown method {method!r}; give magnitude")
    for s in settings:
        if not (0 <= s.sparsity <= 1 and (s.rank is None or s.rank > 0) and 0 <= s.cache_radius < 1):
            raise LyapunovPruneError(f"{s}: give a sparsity of 0 to 1, a rank of 1 or more, a cache radius of 0 to 1")
    if not settings:
        raise LyapunovPruneError("no setting to check; give one sparsity, rank and cache radius or more")


def _without_weights(record: Record) -> Record:
    """What a report needs of a record; its tensors may go."""
    return replace(record, approximation=None, residual=torch.zeros(0), exact=None)  # type: ignore[arg-type]


def _report(
    method: str,
    projections: Sequence[Projection],
    settings: Sequence[Setting],
    outcomes: Sequence[dict[str, Record]],
    composition: tuple[BoundCheck, ...],
    decisions: TokenCertificate | None,
    model: PreTrainedModel,
    batch: TokenBatch,
) -> BoundsReport:
    rows = [[outcome[p.name] for p in projections] for outcome in outcomes]
    checks = [(setting, c) for setting, row in zip(settings, rows, strict=True) for r in row for c in r.checks]
    seen = [r.check for row in rows for r in row if r.check is not None]
    unseen = [r.projection.name for row in rows for r in row if r.check is None and r.projection.expert is None]
    if unseen:
        raise LyapunovPruneError(f"{unseen[0]} took no part in the forward, so its bound was not checked")
    return BoundsReport(
        method=method,
        settings=tuple(settings),
        names=tuple(p.name for p in projections),
        components=tuple(p.component for p in projections),
        layers=tuple(p.layer for p in projections),
        theorems=tuple(dict.fromkeys(c.theorem for c in seen)),
        ratio=np.array([[r.check.ratio if r.check else np.nan for r in row] for row in rows]),
        attained=np.array([[r.probe.ratio if r.probe else np.nan for r in row] for row in rows]),
        hits=sum(r.hits for row in rows for r in row),
        inputs=sum(c.inputs for c in seen),
        violations=tuple(Violation(setting, c) for setting, c in checks if not c.holds),
        composition=composition,
        decisions=decisions,
        measured_on=batch.measured_on(model),
    )
