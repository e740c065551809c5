"""The compressed matrices that a study puts in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.forward.reading import Readable
from lyapunov_prune.linalg import basis, truncate
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.sweep import Job


class Compressor:
    """Compressed matrices of one model, each cached for the latest setting.

    `calibration` is None where no method needs statistics. Memory: a copy of the layers beside the model when a study
    compresses them all.
    """

    def __init__(self, model: PreTrainedModel, calibration: Readable | None) -> None:
        self.model, self.calibration = model, calibration
        self.projections = find_projections(wrap(model))
        self._norms: dict[str, torch.Tensor] | None = None
        self._setting: Compression | None = None
        self._made: dict[Projection, torch.Tensor] = {}

    def __call__(self, setting: Compression, matrices: Iterable[Projection]) -> Mapping[Projection, torch.Tensor]:
        if setting != self._setting:
            self._setting, self._made = setting, {}
        wanted = tuple(matrices)
        self._make(setting, [p for p in wanted if p not in self._made])
        return {p: self._made[p] for p in wanted}

    def jobs(self, changes: Iterable[Change]) -> list[Job]:
        """The changes as jobs of a sweep."""
        return [self._job(change) for change in changes]

    def _job(self, change: Change) -> Job:
        if change.compression is None:
            return Job(change.key, min(change.remove), remove=change.remove)
        if change.compression.low_rank:  # fail early on an impossible rank
            for p in change.matrices:
                change.compression.rank_of(p.weight(self.model).shape)
        weights: Callable[[], Mapping[Projection, torch.Tensor]] = partial(self, change.compression, change.matrices)
        return Job(change.key, min(p.layer for p in change.matrices), weights=weights)

    def _make(self, setting: Compression, missing: Sequence[Projection]) -> None:
        """Compress matrices of the dense model by their dense inputs, with the Gram matrices of one layer at a time."""
        needs = METHODS[setting.method].needs

        def keep(here: Sequence[Projection], statistics: Mapping[str, Statistics]) -> None:
            self._made.update({p: self._compress(setting, p, statistics.get(p.name)) for p in here})

        if needs == "nothing" or not missing:
            keep(missing, {})
        elif needs == "norms":
            norms = self._input_norms()
            keep(missing, {p.name: Statistics(norms[p.name]) for p in missing})
        else:
            assert self.calibration is not None
            stream(self.model, self.calibration, missing, needs, keep)

    def _compress(self, setting: Compression, p: Projection, statistics: Statistics | None) -> torch.Tensor:
        W, method = p.weight(self.model), METHODS[setting.method]()
        if setting.bits is not None:
            return method(W, setting.bits, statistics)
        if setting.low_rank:
            return method(W, setting.rank_of(W.shape), statistics)
        S = method(W, setting.sparsity, statistics)
        return S if setting.rank is None or setting.rank >= min(S.shape) else truncate(S, setting.rank, basis(S))

    def _input_norms(self) -> dict[str, torch.Tensor]:
        if self._norms is None:
            assert self.calibration is not None
            self._norms = input_norms(self.model, self.calibration, self.projections)
        return self._norms
