"""Approximate every matrix of a model and check every bound on every forward.

`check_bounds` takes one setting and follows the errors to the prediction; `check_written` does so with the matrices of
a checkpoint; `check_grid` takes many settings and shares the norm of W, the sparse stage and the basis of the low-rank
stage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.arguments import SOME, Count, Share
from lyapunov_prune.bounds.approx_linear import Record
from lyapunov_prune.bounds.approximate import Radius, Records
from lyapunov_prune.bounds.approximation import Approximation, approximation, certify_difference
from lyapunov_prune.bounds.bound_check import Seen
from lyapunov_prune.bounds.report import WRITTEN, BoundsReport, RatioDistribution, Setting, Violation
from lyapunov_prune.bounds.trajectory import Followed, followed_on
from lyapunov_prune.bounds.written import read_written
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import run_backbone
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import CertifiedNorm, basis, certify, smallest, truncate
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection, shared_weights
from lyapunov_prune.models.roles import LeftAlone, left_alone
from lyapunov_prune.models.structure import identify
from lyapunov_prune.progress import track
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.frames import columns
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.store import Store

A = TypeVar("A")
B = TypeVar("B")
SPARSITIES = (0.0, 0.3, 0.5, 0.7, 0.9)
RANKS = (None, 32, 8)
CACHE_RADII = (0.0, 0.1)


@runs_model
def check_bounds(
    model: InMemory,
    batch: Readable,
    *,
    sparsity: Share = 0.5,
    rank: Count | None = None,
    cache_radius: Radius = 0.0,
    batch_size: Count = 1,
) -> BoundsReport:
    """Approximate every matrix of every layer and check its bound on every token (Theorems 1 to 4).

    The share `sparsity` of the smallest entries is set to zero; with `rank`, the result is truncated to that rank; with
    `cache_radius`, a token within that radius (relative to its norm) reuses the product of an earlier token. Errors
    propagate through the model. They are composed layer by layer (`trajectory_error_le`), compared with the growth of
    the state (`residual_growth_contraction`, `lyapunov_contraction_bound`) and with its alignment with the output of
    the layers (`preln_contraction_sufficient`) — all of these are estimates — and followed to the prediction
    (`argmax_unchanged_of_state_error`). A reported violation is real by `violation_is_real`; rounding alone raises none
    by `no_false_alarm`.

    Raises LyapunovPruneError for a bad setting or batch, or for NaN in a state.
    """
    reading = read(model, batch)
    setting = Setting(float(sparsity), rank, float(cache_radius))
    projections = find_projections(model)
    left = left_alone(model.structure, projections)
    weights = shared_weights(model.model, projections)

    def approximated(W: torch.Tensor) -> Approximation:
        stage = _sparse_stage((W, certify(W)), setting.sparsity, with_basis=rank is not None)
        return _approximate(stage, rank)

    chosen = _each(approximated, weights, "certified norms")
    records = Records(reading.model, {p: chosen[p.name] for p in projections}, setting.cache_radius)
    followed = followed_on(reading, records, batch_size)
    return _report(
        projections, [setting], [_seen(records)], reading.measured_on(), left, **_followed(followed, records)
    )


@runs_model
def check_written(
    model: InMemory, compressed: PreTrainedModel, batch: Readable, *, method: str = WRITTEN, batch_size: Count = 1
) -> BoundsReport:
    """Check the bounds for the matrices of `compressed`, a model made from `model` by any method, on every token.

    For `W` of the dense and `W'` of the compressed model, `‖W x − W' x‖ ≤ ‖W − W'‖ ‖x‖` with a certified norm (Theorem
    2, `sparse_activation_bound`, valid for any `W'`). The `x` are the inputs in the forward of `compressed`: the dense
    model runs with the matrices of the compressed one, which is equivalent if nothing else differs. Quantised weights
    are read as `load` unpacks them (compressed-tensors, GGUF). If embedding or head differ, both models run with those
    of `compressed`, so that every error is one of the matrices. Errors are composed and followed as in `check_bounds`.
    `method` says in the report what made the matrices, if the caller knows.

    Raises LyapunovPruneError if the models differ in more than that (`read_written`), for a bad batch, and for NaN in a
    state.
    """
    reading = read(model, batch)
    on = reading.measured_on()  # before the embeddings are exchanged
    written = read_written(reading, compressed)
    projections = find_projections(model)
    left = left_alone(model.structure, projections)
    pairs = {p.name: (p.weight(reading.model), written.matrices[p.name]) for p in projections}
    chosen = _each(lambda pair: approximation(*pair), pairs, "certified norms")
    with written.with_embeddings(reading.model):
        records = Records(reading.model, {p: chosen[p.name] for p in projections})
        followed = followed_on(reading, records, batch_size)
    return _report(
        projections,
        [],
        [_seen(records)],
        on,
        left,
        method=method,
        compressed=identify(compressed),
        shared=tuple(written.embeddings),
        **_followed(followed, records),
    )


@runs_model
def check_grid(
    model: InMemory,
    batch: Readable,
    *,
    sparsities: Annotated[Sequence[Share], SOME] = SPARSITIES,
    ranks: Annotated[Sequence[Count | None], SOME] = RANKS,
    cache_radii: Annotated[Sequence[Radius], SOME] = CACHE_RADII,
    batch_size: Count = 1,
    folder: str | Path | None = None,
) -> BoundsReport:
    """`check_bounds` for every combination of sparsity, rank and cache radius (thirty by default).

    Norms and decompositions are computed once per matrix, and once for layers that share their weights. The default
    grid covers each of Theorems 1 to 4 and a setting that changes nothing, whose error must be exactly zero. Alarms are
    as in `no_false_alarm` and `violation_is_real`. Finished settings are kept in `folder` (see `Store`) and skipped
    by a later run. Memory beside the model: the sparse, low-rank and residual weights of all layers, and the float64
    bases of one sparsity.
    """
    reading = read(model, batch)
    settings = [Setting(float(s), r, float(c)) for s in sparsities for r in ranks for c in cache_radii]
    projections = find_projections(model)
    left = left_alone(model.structure, projections)
    weights = shared_weights(model.model, projections)
    about = {**reading.measured_on().key, "method": "magnitude"}
    with Store(folder, "check", about) as store:
        known = _each(lambda W: (W, certify(W)), weights, "norms of the weights")

        def missing(*parts: Any) -> list[Setting]:
            """The unfinished settings that start with these values."""
            return [s for s in settings if (s.sparsity, s.rank)[: len(parts)] == parts and s.key not in store]

        for sparsity in sparsities:
            if not missing(sparsity):
                continue
            stage = partial(_sparse_stage, sparsity=sparsity, with_basis=any(rank is not None for rank in ranks))
            stages = _each(stage, known, f"sparsity {sparsity:g}")
            for rank in ranks:
                if not missing(sparsity, rank):
                    continue
                chosen = _each(
                    partial(_approximate, rank=rank), stages, f"sparsity {sparsity:g}, rank {rank or 'full'}"
                )
                for setting in missing(sparsity, rank):
                    by_matrix = {p: chosen[p.name] for p in projections}
                    records = Records(reading.model, by_matrix, setting.cache_radius)
                    seen = _outcome(reading, records, batch_size)
                    store.add(setting.key, {name: encode(s) for name, s in seen.items()})
                chosen.clear()
        outcomes = [{name: decode(Seen, s) for name, s in store[setting.key].items()} for setting in settings]
    return _report(projections, settings, outcomes, reading.measured_on(), left)


def _outcome(reading: Reading, records: Records, batch_size: int) -> dict[str, Seen]:
    """The records under one setting."""
    with records.installed():
        for ids in reading.windows(batch_size):
            run_backbone(reading.structure, ids)
    return _seen(records)


def _seen(records: Mapping[str, Record]) -> dict[str, Seen]:
    names = [field.name for field in fields(Seen)]
    return {name: Seen(**columns(record, *names)) for name, record in records.items()}


def _each(work: Callable[[A], B], items: Mapping[str, A], description: str) -> dict[str, B]:
    """Run `work` for every matrix, once for names that share one item; one matrix per core, because most are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {
                key: pool.submit(work, item) for key, item in {id(item): item for item in items.values()}.items()
            }
            return {name: futures[id(item)].result() for name, item in track(list(items.items()), description)}
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class _Stage:
    """What is shared by all ranks at one sparsity."""

    W: torch.Tensor
    norm: CertifiedNorm
    S: torch.Tensor
    removed: CertifiedNorm  # ‖W − S‖
    basis: torch.Tensor | None


def _sparse_stage(known: tuple[torch.Tensor, CertifiedNorm], sparsity: float, with_basis: bool) -> _Stage:
    W, norm = known
    count = round(sparsity * W.numel())
    S = W.masked_fill(smallest(W.abs(), count), 0) if count else W
    return _Stage(W, norm, S, certify_difference(W, S), basis(S) if with_basis else None)


def _approximate(stage: _Stage, rank: int | None) -> Approximation:
    L = stage.S
    if rank is not None and stage.basis is not None:
        L = truncate(stage.S, rank, stage.basis)
    return approximation(stage.W, L, sparse=stage.S, weight=stage.norm, sparse_residual=stage.removed)


def _report(
    projections: Sequence[Projection],
    settings: Sequence[Setting],
    outcomes: Sequence[Mapping[str, Seen]],
    measured_on: MeasuredOn,
    left: tuple[LeftAlone, ...],
    *,
    method: str = "magnitude",
    **more: Any,
) -> BoundsReport:
    """The report of the checks of single matrices, with the fields `more`.

    Raises LyapunovPruneError if no input of any was recorded.
    """
    rows = [[outcome[p.name] for p in projections] for outcome in outcomes]
    named: Sequence[Setting | None] = settings or [None]  # a checkpoint has no setting
    checks = [(setting, c) for setting, row in zip(named, rows, strict=True) for r in row for c in r.checks]
    seen = [r.check for row in rows for r in row if r.check is not None]
    if not seen:
        raise LyapunovPruneError("the inputs of no matrix could be recorded, so no bound was checked")
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
        measured_on=measured_on,
        left_alone=left,
        **more,
    )


def _followed(followed: Followed, records: Records) -> dict[str, Any]:
    """The fields of a report for what was measured along the trajectories, and on every input."""
    growth = followed.growth
    return {
        "composition": growth.composition(),
        "contraction": growth.contraction(),
        "gamma": growth.gamma,
        "decisions": followed.decisions,
        "distribution": RatioDistribution.of([np.concatenate([*r.ratios, np.zeros(0)]) for r in records.values()]),
        "alignment": followed.alignment,
        "phases": growth.phases(),
    }
