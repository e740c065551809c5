"""The experiments of a sensitivity map, as jobs of a sweep."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from lyapunov_prune.calibration.norms import input_norms
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.method import rank_for
from lyapunov_prune.compression.methods.svd import basis, truncate
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable
from lyapunov_prune.models.projections import Projection, find_projections, groups
from lyapunov_prune.sensitivity.sweep import Job, badness
from lyapunov_prune.sensitivity.table import STUDIES, STUDY_METHODS

UNIFORM_SPARSITIES = (0.1, 0.3, 0.5, 0.7, 0.9)
UNIFORM_RANKS = (8, 16, 32, 64, 128, 256)
FIRST_LAYER_SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99)
CLIFF_SPARSITIES = (0.3, 0.5, 0.7, 0.9, 0.95)
THRESHOLD_SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
ROUNDS = 36


@dataclass(frozen=True)
class Compression:
    """Remove a share `sparsity` of the entries by `method`, then truncate to `rank`, if given.

    A low-rank method keeps `rank`, or by default the rank that leaves `1 − sparsity` of the parameters (`rank_for`);
    with a rank the sparsity is 0.
    """

    method: str
    sparsity: float
    rank: int | None

    def __post_init__(self) -> None:
        if self.low_rank and self.rank is not None:
            object.__setattr__(self, "sparsity", 0.0)

    @property
    def low_rank(self) -> bool:
        return self.method in STUDY_METHODS and STUDY_METHODS[self.method].unit == "rank"

    def at(self, sparsity: float) -> Compression:
        """The same at another sparsity (and the rank that follows from it)."""
        return Compression(self.method, sparsity, None if self.low_rank else self.rank)

    def rank_of(self, shape: Sequence[int]) -> int:
        """The rank that a low-rank method keeps of a matrix; full rank if unchanged. Raises like `rank_for`."""
        rank = rank_for(shape, self.sparsity) if self.rank is None else self.rank
        return min(shape) if rank is None else min(rank, *shape)

    def require(self) -> None:
        """Raise LyapunovPruneError for an unknown method or an impossible sparsity or rank."""
        if self.method not in STUDY_METHODS:
            raise LyapunovPruneError(f"unknown method {self.method!r}; give one of {', '.join(STUDY_METHODS)}")
        if not 0 <= self.sparsity <= 1 or (self.rank is not None and self.rank < 1):
            raise LyapunovPruneError(f"{self}: give a sparsity of 0 to 1 and a rank of 1 or more")

    def __str__(self) -> str:
        if self.low_rank:
            return f"{self.method}, " + (f"sparsity {self.sparsity:g}" if self.rank is None else f"rank {self.rank}")
        return f"{self.method}, sparsity {self.sparsity:g}, rank {self.rank or 'full'}"

    def kept(self, shape: Sequence[int]) -> float:
        """Multiplications per input, out of the `m n` of a dense matrix: entries kept, or two factors if fewer."""
        m, n = shape[-2:]
        if self.low_rank:
            return min(m * n, self.rank_of((m, n)) * (m + n))
        entries = (1 - self.sparsity) * m * n
        return entries if self.rank is None else min(entries, self.rank * (m + n))


@dataclass(frozen=True)
class Change:
    """One experiment of a study: `matrices` under `compression`, or the layers `remove` left out."""

    study: str
    label: str
    matrices: tuple[Projection, ...] = ()
    compression: Compression | None = None
    remove: tuple[int, ...] = ()

    @property
    def layer(self) -> int | None:
        """The layer, if there is only one."""
        layers = {p.layer for p in self.matrices} | set(self.remove)
        return layers.pop() if len(layers) == 1 else None

    @property
    def component(self) -> str | None:
        """The component, if there is only one."""
        components = {p.component for p in self.matrices}
        return components.pop() if len(components) == 1 else None

    @property
    def key(self) -> str:
        """Equal for equal changes of different studies, so that each is measured once."""
        if self.remove:
            return f"remove {','.join(map(str, self.remove))}"
        assert self.compression is not None
        c, names = self.compression, ",".join(sorted(p.name for p in self.matrices))
        setting = f"{c.method}, sparsity {float(c.sparsity)!r}, rank {c.rank or 'full'}"
        return f"{setting}: {len(self.matrices)} matrices, {hashlib.sha256(names.encode()).hexdigest()[:16]}"


class Compressor:
    """Compressed matrices of one model, each cached for the latest setting.

    Memory: a copy of the layers beside the model when a study compresses them all.
    """

    def __init__(self, model: PreTrainedModel, calibration: Readable | None) -> None:
        self.model, self.calibration = model, calibration
        self.projections = find_projections(model)
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
        """Compress matrices of the dense model with their inputs there; Gram matrices are of one layer at a time."""
        needs = STUDY_METHODS[setting.method].needs

        def keep(here: Sequence[Projection], statistics: Mapping[str, Statistics]) -> None:
            self._made.update({p: self._compress(setting, p, statistics.get(p.name)) for p in here})

        if needs == "nothing" or not missing:
            keep(missing, {})
        elif needs == "norms":
            norms = self._input_norms(setting.method)
            keep(missing, {p.name: Statistics(norms[p.name]) for p in missing})
        else:
            stream(self.model, self._text(setting.method), missing, needs, keep)

    def _compress(self, setting: Compression, p: Projection, statistics: Statistics | None) -> torch.Tensor:
        W, method = p.weight(self.model), STUDY_METHODS[setting.method]()
        if setting.low_rank:
            return method(W, setting.rank_of(W.shape), statistics)
        S = method(W, setting.sparsity, statistics)
        return S if setting.rank is None or setting.rank >= min(S.shape) else truncate(S, setting.rank, basis(S))

    def _input_norms(self, method: str) -> dict[str, torch.Tensor]:
        if self._norms is None:
            self._norms = input_norms(self.model, self._text(method), self.projections)
        return self._norms

    def _text(self, method: str) -> Readable:
        if self.calibration is None:
            raise LyapunovPruneError(f"{method} needs calibration text; give some, or method magnitude")
        return self.calibration


def changes(
    study: str, projections: Sequence[Projection], base: Compression, losses: Mapping[str, float]
) -> list[Change]:
    """The experiments of a study (structural sensitivity, §5 and §6.1) under the setting `base`.

    `losses` are the measured losses by key: for the studies that depend on them (`after_groups`), those of every group
    compressed alone. A study that depends on its own losses returns the changes it needs next, until all of them are
    measured. Raises LyapunovPruneError for an unknown study.
    """
    if study not in STUDIES:
        raise LyapunovPruneError(f"unknown study {study!r}; give one of {', '.join(STUDIES)}")
    return _FUNCTIONS[study](tuple(projections), base, losses)


def _matrix(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    return [Change("matrix", p.name, (p,), base) for p in ps]


def _group(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    """A component of one layer, with all its heads or experts: the paper's compression groups."""
    named = {p.name: p for p in ps}
    return [
        Change("group", f"{layer} {component}", tuple(named[name] for name in names), base)
        for (component, layer), names in groups(ps).items()
    ]


def _layer(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    return [Change("layer", f"layer {k}", group, base) for k, group in _by_layer(ps).items()]


def _component(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    names = dict.fromkeys(p.component for p in ps)
    return [Change("component", name, tuple(p for p in ps if p.component == name), base) for name in names]


def _forward(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    return [Change("forward", f"layers 0 to {k}", tuple(p for p in ps if p.layer <= k), base) for k in _by_layer(ps)]


def _backward(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    last = max(_by_layer(ps))
    return [
        Change("backward", f"layers {k} to {last}", tuple(p for p in ps if p.layer >= k), base)
        for k in sorted(_by_layer(ps), reverse=True)
    ]


def _sparsity(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    return [Change("sparsity", f"sparsity {s:g}", ps, Compression(base.method, s, None)) for s in UNIFORM_SPARSITIES]


def _rank(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    return [Change("rank", f"rank {r}", ps, Compression(base.method, 0.0, r)) for r in UNIFORM_RANKS]


def _layer0(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    first = _by_layer(ps)[min(_by_layer(ps))]
    return [Change("layer0", f"sparsity {s:g}", first, base.at(s)) for s in FIRST_LAYER_SPARSITIES]


def _threshold(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    first = _by_layer(ps)[min(_by_layer(ps))]
    return [Change("threshold", f"sparsity {s:g}", first, Compression("wanda", s, None)) for s in THRESHOLD_SPARSITIES]


def _cliff(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    """The most sensitive component of each layer, at five sparsities."""
    alone = _group(ps, base, losses)
    worst = max(alone, key=lambda group: badness(losses[group.key])).component
    return [
        Change("cliff", f"{group.label}, sparsity {s:g}", group.matrices, base.at(s))
        for s in CLIFF_SPARSITIES
        for group in alone
        if group.component == worst
    ]


def _greedy(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    """Round k compresses the k groups of least regret (measured alone) together."""
    order = sorted(_group(ps, base, losses), key=lambda group: badness(losses[group.key]))
    return [
        Change("greedy", f"+ {order[k].label}", tuple(p for group in order[: k + 1] for p in group.matrices), base)
        for k in range(min(ROUNDS, len(order)))
    ]


def _greedy_rescored(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    """Each round adds the group that gives the least loss together with those chosen before.

    Returns the rounds that `losses` decides, and the changes to measure for the next one: about `rounds × groups` in
    all.
    """
    left, rounds = _group(ps, base, losses), list[Change]()
    taken: tuple[Projection, ...] = ()
    while left and len(rounds) < ROUNDS:
        tried = [Change("greedy-rescored", f"+ {g.label}", (*taken, *g.matrices), base) for g in left]
        if not all(change.key in losses for change in tried):
            return rounds + tried
        best = min(range(len(left)), key=lambda i: badness(losses[tried[i].key]))
        taken = tried[best].matrices
        rounds.append(tried[best])
        del left[best]
    return rounds


def _removal(ps: tuple[Projection, ...], base: Compression, losses: Mapping[str, float]) -> list[Change]:
    return [Change("removal", f"layer {k}", remove=(k,)) for k in _by_layer(ps)]


def _by_layer(ps: tuple[Projection, ...]) -> dict[int, tuple[Projection, ...]]:
    return {k: tuple(p for p in ps if p.layer == k) for k in dict.fromkeys(p.layer for p in ps)}


_FUNCTIONS: dict[str, Callable[[tuple[Projection, ...], Compression, Mapping[str, float]], list[Change]]] = {
    "matrix": _matrix,
    "group": _group,
    "layer": _layer,
    "component": _component,
    "forward": _forward,
    "backward": _backward,
    "sparsity": _sparsity,
    "rank": _rank,
    "layer0": _layer0,
    "cliff": _cliff,
    "greedy": _greedy,
    "greedy-rescored": _greedy_rescored,
    "threshold": _threshold,
    "removal": _removal,
}
