"""Gap by gap: fit a linear map for the layer before the gap that replaces the removed layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.dealing import summed
from lyapunov_prune.forward.hooks import hidden_of, with_hidden
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import lift, require_numbers
from lyapunov_prune.mending.fit import FORMS, LinearMap, Sums, fit
from lyapunov_prune.mending.place import Place, find_place, multiplied
from lyapunov_prune.mending.report import NONE, Gap, MendReport
from lyapunov_prune.merging.reduction import HiddenMap
from lyapunov_prune.models.decoder import Model, in_memory, model_of
from lyapunov_prune.models.feedforward import Affine
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.launched import from_each, sharing
from lyapunov_prune.models.plain import require_weights
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import track

# A matrix, the map before it, and the stored matrix that should be their product.
Product = tuple[Affine, HiddenMap, Affine]
RIDGES = (0.01, 0.1, 1.0)
_HELD_OUT = 4  # the last fourth of the windows is held out, to choose form and ridge


@dataclass(frozen=True, eq=False)
class Mend:
    """A map and its place."""

    place: Place
    map: LinearMap


@in_eval_mode
def fit_mends(
    model: Model, removed: Sequence[int], batch: Readable, *, of: int = 1
) -> tuple[tuple[Mend, ...], MendReport]:
    """Fit the maps that close the gaps of `removed` layers; a gap that no map helps gets none. `model` is not changed.

    With m the output at the last place of the layer before a gap, h the state after that layer and y the dense state
    after the gap, E and b minimise `Σ_t ‖E m_t + b − (y_t − h_t)‖² / ‖y_t‖` with a ridge (`fit`). Unweighted squares
    would be dominated by an attention sink, hundreds of times as large, and relative squares by the smallest tokens.
    Gaps are mended in order, each on the states after the mended ones before it. Form and ridge (or no map) are chosen
    by the next-token loss on the last fourth of the windows, which no map was fitted on. The chosen map is fitted again
    on all windows.

    Cost: one forward of the dense and one of the pruned model over all windows, and for each gap and candidate the
    layers after it over a fourth of them. `batch` is one in `of` windows of the given text, which only matters for
    errors.

    Raises LyapunovPruneError for quantised weights, a batch of one window, fewer tokens than the map has columns, a gap
    without a layer before it, a layer that can take no map (`find_place`), and if no loss is finite.
    """
    require_weights(model_of(model), "unquantised")
    reading = read(in_memory(model), batch)
    removed = sorted(removed)
    gaps = [[layer for _, layer in run] for _, run in groupby(enumerate(removed), key=lambda pair: pair[1] - pair[0])]
    if removed and removed[0] == 0:
        raise LyapunovPruneError(
            "layer 0 is removed, and no layer is before the gap to be mended; keep it (--protect 0), or leave out "
            "mending"
        )
    fitted, held = fitted_and_held(reading, of)
    tokens = sum(w.numel() for w in fitted)
    places = [find_place(reading.decoder, gap[0] - 1) for gap in gaps]
    walks = _Walks(reading, tuple(removed), fitted, held)
    mends: list[Mend] = []
    tables: list[Gap] = []
    for gap, place in zip(track(gaps, "mending"), places, strict=True):
        stop = gap[-1] + 1
        sums = walks.sums(walks.fitted, place, mends, gap[0], stop)
        tried = [(NONE, 0.0, walks.loss(mends, gap[0] - 1))]
        for form, ridge in _candidates(place):
            found = Mend(place, fit(form, sums, ridge, shifts=bool(place.shifts)))
            tried.append((form, ridge, walks.loss([*mends, found], gap[0] - 1)))
        forms, ridges, losses = zip(*tried, strict=True)
        chosen = _least(losses)
        if forms[chosen] != NONE:
            sums = sums + walks.sums(walks.held, place, mends, gap[0], stop)
            mends.append(Mend(place, fit(forms[chosen], sums, ridges[chosen], shifts=bool(place.shifts))))
        tables.append(Gap(place.layer, stop, place.module, forms, np.array(ridges), np.array(losses), chosen))
    seen = sum(w.numel() for w in held)
    return tuple(mends), MendReport(tuple(tables), tokens, seen, reading.measured_on())


def fitted_and_held(reading: Reading, of: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The windows to fit on, and the last fourth of them, which is held out to choose form and ridge.

    `reading` holds one in `of` windows of the given text. Raises LyapunovPruneError if a map has more columns than
    there are tokens.
    """
    windows = reading.windows(1)
    first = len(windows) - max(1, len(windows) // _HELD_OUT)
    fitted, held = windows[:first], windows[first:]
    tokens, width = sum(w.numel() for w in fitted), _width(reading)
    if tokens < width:
        raise LyapunovPruneError(
            f"{tokens} tokens are too few to fit a map of {width} channels; give at least {-(-4 * of * width // 3)} "
            "tokens in 8 windows (--tokens, --context), of which a fourth is held out"
        )
    return fitted, held


def mapped(layers: nn.ModuleList, mends: Sequence[Mend]) -> AbstractContextManager[None]:
    """Every forward inside the block applies the maps of `mends`: the reference for a mended model."""

    def hook(change: LinearMap) -> Callable[..., Any]:
        return lambda module, args, kwargs, output: with_hidden(output, change(hidden_of(output)))

    return hooked(after=[(layers[m.place.layer].get_submodule(m.place.module), hook(m.map)) for m in mends])


# Held-out losses of one gap: without a map, and with each candidate.
TRIALS = 2 + (len(FORMS) - 1) * len(RIDGES)


def _candidates(place: Place) -> list[tuple[str, float]]:
    forms = [form for form in FORMS if form in ("channels", "shift") or not place.channels]
    pairs = [(form, ridge) for form in forms if form != "shift" for ridge in RIDGES]
    return pairs + ([("shift", 0.0)] if place.shifts else [])


def _least(losses: Sequence[float]) -> int:
    """Index of the smallest loss. Raises LyapunovPruneError if none is finite."""
    if not np.isfinite(losses).any():
        raise LyapunovPruneError(
            "no held-out loss of the pruned model is finite, mended or not; remove other layers, or load it in a wider "
            "dtype"
        )
    return int(np.nanargmin(losses))


def _width(reading: Reading) -> int:
    return int(reading.prefix.advance(reading.windows(1)[0], 0, None, 1).shape[-1])


class _Walks:
    """The windows on their way through the dense model and through the mended one.

    Processes of `accelerate launch` take a share each, and add their sums, if there is a held-out window for each.
    """

    def __init__(
        self, reading: Reading, removed: tuple[int, ...], fitted: list[torch.Tensor], held: list[torch.Tensor]
    ) -> None:
        self.reading, self.removed = reading, removed
        self.prefix, self.scorer = reading.prefix, reading.scorer
        among = sharing(reading.model)
        self._shared = among is not None and len(held) >= among.num_processes
        mine = slice(among.process_index, None, among.num_processes) if among and self._shared else slice(None)
        self.fitted, self.held = (
            _Both(_Walk(reading, some[mine]), _Walk(reading, some[mine])) for some in (fitted, held)
        )

    def sums(self, some: _Both, place: Place, mends: Sequence[Mend], before: int, behind: int) -> Sums:
        """Sums for the layer before boundary `before`, whose state should become the dense one at boundary `behind`."""
        begin, (dense, mended) = self.prefix.entry(place.layer), some
        dense.to(behind)
        module = self.reading.structure.layers[place.layer].get_submodule(place.module)
        outputs: list[torch.Tensor] = []
        note = (module, lambda module, args, kwargs, output: outputs.append(hidden_of(output).clone()))
        with self._cut(mends):
            self.fitted.mended.to(begin)
            self.held.mended.to(begin)
            sums: Sums | None = None
            for ids, start, y in zip(mended.windows, mended.states, dense.states, strict=True):
                outputs.clear()
                with hooked(after=[note]):
                    h = self.prefix.advance(ids, begin, start, before)
                # The layers of a gap may be on another device.
                m, h, y = (lift(t.reshape(-1, t.shape[-1])).to(outputs[0].device) for t in (outputs[0], h, y))
                sums = sums or Sums(m.shape[-1], m.device)
                sums.add(m, (y - h) / place.scale, y.square().sum(-1).clamp_min(1e-300).rsqrt())
        assert sums is not None
        if self._shared:
            summed(self.reading.model, *vars(sums).values())
        return sums

    def loss(self, mends: Sequence[Mend], layer: int) -> float:
        """Mean loss of the held-out windows, continued from `layer`."""
        begin = self.prefix.entry(layer)
        losses: list[float] = []
        held = self.held.mended
        for ids, start in zip(held.windows, held.states, strict=True):
            with self._cut(mends), self.prefix.entered(begin, start if begin else torch.empty(0)):
                losses += self.scorer(ids)[0]
        each = from_each(self.reading.model, losses) if self._shared else [losses]
        in_order = [loss for some in zip_longest(*each) for loss in some if loss is not None]
        return float(np.mean(in_order))

    def _cut(self, mends: Sequence[Mend]) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self.prefix.without(self.removed))
        stack.enter_context(mapped(self.reading.structure.layers, mends))
        return stack


class _Walk:
    """States of windows at a boundary from which a forward can continue."""

    def __init__(self, reading: Reading, windows: list[torch.Tensor]) -> None:
        self.prefix, self.windows = reading.prefix, windows
        self.at = 0
        self.states: list[Any] = [None] * len(windows)

    def to(self, boundary: int) -> None:
        if boundary == self.at:
            return
        start = self.at if self.at in self.prefix.entries else 0
        self.states = [
            self.prefix.advance(ids, start, state if start else None, boundary)
            for ids, state in zip(self.windows, self.states, strict=True)
        ]
        self.at = boundary


class _Both(NamedTuple):
    """The same windows on their way through the dense model and through the mended one."""

    dense: _Walk
    mended: _Walk


@torch.no_grad()
def store_mend(layer: nn.Module, mend: Mend) -> None:
    """Multiply the parameters of the place in `layer` by the map, in place: in float64, rounded once.

    Raises LyapunovPruneError when the product overflows the parameter's dtype.
    """
    for part in mend.place.parts:
        p = layer.get_parameter(part.name)
        shift = mend.map.shift if part.name == mend.place.shifts else None
        stored = multiplied(p, part, mend.map.E.to(p.device), None if shift is None else shift.to(p.device)).to(p)
        require_numbers(stored, f"{part.name} of layer {mend.place.layer}, mended, in {p.dtype}")
        p.copy_(stored)


def products(before: nn.Module, after: nn.Module, mend: Mend) -> list[Product]:
    """`(I + E)` times each part of the layer `before`, next to the stored part of the layer `after`.

    A bias or the weight of a norm enters as the constant of an affine map.
    """
    E, shift = mend.map.E, mend.map.shift
    whole = torch.eye(len(E)).to(E) + (E.diag() if E.ndim == 1 else E)
    rows: list[Product] = []
    for part in mend.place.parts:
        old, new = (layer.get_parameter(part.name).detach().movedim(part.axis, 0) for layer in (before, after))
        if old.ndim > 1:
            rows.append(((whole, None), HiddenMap(lift(old.flatten(1)), None), (new.flatten(1), None)))
            continue
        moved = torch.full_like(whole[0], -part.offset)
        if shift is not None and part.name == mend.place.shifts:
            moved = moved + shift
        none = torch.zeros(len(old), 1)
        rows.append(((whole, moved), HiddenMap(none.to(whole), lift(old) + part.offset), (none.to(new), new)))
    return rows
