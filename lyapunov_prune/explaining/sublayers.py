"""Which of attention and MLP adds the error of a layer, and which amplifies it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.explaining.decomposition import PARTS, Decomposed, ErrorSums, difference
from lyapunov_prune.explaining.pair import Side
from lyapunov_prune.forward.branches import Branch
from lyapunov_prune.forward.hooks import hidden_of, layer_input, with_hidden
from lyapunov_prune.forward.states import KeptStates
from lyapunov_prune.forward.sublayers import Sublayers
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.results.arrays import require_fitting
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import Result

_ROWS = 8
_SAME = 1e-2  # relative tolerance of the state between the sublayers against its parts, on a few tokens


_Boundary = Annotated[np.ndarray, Per("step+1")]


@dataclass(frozen=True)
class SublayerErrors(Decomposed, Result):
    """The error after each attention and each MLP as inherited + added + amplified: L layers, 2 L steps in order.

    `kinds` names both sublayers of a layer in the order in which they run; empty if no state lies between them
    (parallel sublayers, or norms after the sum). The arrays are those of `Decomposed`; the
    state between the sublayers is a boundary of its own. The compressed attention runs on the dense state that enters
    the layer, and the compressed MLP on the dense state between the sublayers.
    """

    kinds: tuple[tuple[str, ...], ...]
    size: _Boundary
    error: _Boundary
    energy: Annotated[np.ndarray, Per(3, "step")]
    along: Annotated[np.ndarray, Per(3, "step", least=-np.inf)]
    off: Annotated[np.ndarray, Per("step")]
    rounding: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fitting(len(self.off) == 2 * len(self.kinds), "errors of sublayers: there are two a layer")

    def to_frame(self) -> pd.DataFrame:
        """One row per sublayer of the layers that have two."""
        rows = [(layer, kind, 2 * layer + i) for layer, pair in enumerate(self.kinds) for i, kind in enumerate(pair)]
        steps = [step for *_, step in rows]
        parts = dict(zip(PARTS, self.parts[:, steps], strict=True))
        frame = pd.DataFrame({"layer": [row[0] for row in rows], "sublayer": [row[1] for row in rows], **parts})
        return frame.assign(error=self.relative[1:][steps])

    def brief(self) -> pd.DataFrame:
        """The sublayers that add most, the largest first."""
        return self.to_frame().sort_values("added", ascending=False, kind="stable").head(_ROWS)

    def answer(self) -> list[str]:
        names = {kind for pair in self.kinds for kind in pair}
        told = []
        for name in sorted(names):
            steps = [2 * k + pair.index(name) for k, pair in enumerate(self.kinds) if name in pair]
            carried = float(self.carried[steps].sum())
            way = f"makes {carried:.3g} by amplifying" if carried > 0 else f"takes {-carried:.3g} by damping"
            told.append(f"{name} adds {self.parts[1, steps].sum():.3g} of the relative error and {way}")
        worst = int(np.argmax(self.off))
        sums = (
            "the parts of every sublayer add up"
            if self.adds_up
            else f"THE PARTS OF THE SUBLAYERS OF LAYER {worst // 2} DO NOT ADD UP, by {self.off[worst]:.2g}"
        )
        return [f"By sublayer: {'; '.join(told)}; {sums}."]


@dataclass(frozen=True)
class _Split:
    """How one layer is split: the state in between is `h + scale · (first sublayer's output)` and enters `entry`."""

    kinds: tuple[str, ...]
    first: Branch
    entry: nn.Module
    scale: float


class Middles:
    """The states between the two sublayers of each layer of one model; layers are numbered as in the dense one."""

    def __init__(self, side: Side) -> None:
        self.side = side
        try:
            found = side.reading.sublayers
        except LyapunovPruneError:  # for example, weights that stay packed
            found = {}
        splits: dict[int, _Split] = {}
        for own, pair in found.items():
            with side.held(side.layers[own]):
                if (split := _split(pair)) is not None:
                    splits[side.layers[own]] = split
        entries = [split.entry for split in splits.values()]
        self.splits = splits if len(set(entries)) == len(entries) else {}  # no split for layers that share modules

    @contextmanager
    def watched(self, seen: KeptStates) -> Iterator[None]:
        """Inside the block, add the state between the sublayers of every layer that runs to `seen`, by layer."""

        def add(layer: int, state: torch.Tensor) -> None:
            if state.ndim == 2:  # OPT joins windows and tokens before its MLP
                state = state.unflatten(0, (-1, self.side.reading.batch.ids.shape[1]))
            seen.add(layer, state)

        def note(layer: int) -> Any:
            return lambda module, args, kwargs: add(layer, layer_input(args, kwargs))

        with hooked(before=[(split.entry, note(layer)) for layer, split in self.splits.items()]):
            yield

    def run(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of `layer` for the input `hidden`, and the state between its sublayers (`hidden` if none)."""
        seen = KeptStates(1, len(ids))
        with self.watched(seen):
            left = self.side.run(layer, ids, hidden)
        return left, seen.get(layer, hidden)

    def finish(
        self, layer: int, ids: torch.Tensor, hidden: torch.Tensor, middle: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of `layer` for the input `hidden` if `middle` is the state between its sublayers, and that state.

        The output of the first sublayer is replaced by one that makes the state `middle`; the state returned is the
        measured one, which equals `middle` up to rounding.
        """
        split = self.splits[layer]
        wanted = (middle.double() - hidden.to(middle.device).double()) / split.scale
        rest = [wanted.flatten(0, 1)]  # taken in pieces: a streamed layer runs the windows one piece after another

        def exchange(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            before = hidden_of(output)
            tokens = before.numel() // before.shape[-1]
            here, rest[0] = rest[0][:tokens], rest[0][tokens:]
            return with_hidden(output, here.to(before).view_as(before))

        with hooked(after=[(split.first.exit, exchange)]):
            return self.run(layer, ids, hidden)


def _split(found: Sublayers) -> _Split | None:
    """The split of a layer; None unless it has two sublayers one after the other and adds the first to the stream."""
    if found.parallel or len(found.branches) != 2:
        return None
    first, second = found.branches.values()
    added, step = first(first.x).double(), second.x.double() - first.x.double()
    scale = float((step * added).sum() / added.square().sum())
    if not (step - scale * added).norm() <= _SAME * step.norm():
        return None
    return _Split(tuple(found.branches), first, second.entry, 1.0 if abs(scale - 1) < _SAME else scale)


class SublayerSums:
    """Sums of `SublayerErrors` over windows."""

    def __init__(self, sides: tuple[Side, Side]) -> None:
        self.dense, self.compressed = (Middles(side) for side in sides)
        there = self.compressed.side.layers
        ours, theirs = self.dense.splits, self.compressed.splits
        self.kinds = tuple(
            ours[k].kinds
            if k in ours and (k not in there or (k in theirs and theirs[k].kinds == ours[k].kinds))
            else ()
            for k in range(self.dense.side.total)
        )
        self.sums = ErrorSums(2 * len(self.kinds))

    def add_states(
        self,
        dense: Sequence[torch.Tensor],
        changed: Sequence[torch.Tensor],
        between: tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]],
    ) -> None:
        """Add the states of whole forwards at the layer boundaries and, in `between`, between the sublayers."""
        ours, theirs = (
            [state for k, h in enumerate(states[:-1]) for state in (h, middles.get(k, h))] + [states[-1]]
            for states, middles in zip((dense, changed), between, strict=True)
        )
        self.sums.add_states(ours, [h.to(ours[0].device) for h in theirs])

    def add_layer(
        self,
        layer: int,
        ids: torch.Tensor,
        whole: tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], tuple[torch.Tensor, ...]],
        alone: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]],
    ) -> None:
        """Add a layer.

        `whole` holds the states before, between and after the sublayers in both models; `alone` those between and after
        them when the compressed layer runs on the dense and on the compressed state.
        """
        (h, middle, out), changed = whole
        if not self.kinds[layer] or middle is None:
            return
        (between, behind), (moved, moved_out) = alone
        reached = middle
        if layer not in self.compressed.side.layers:
            finished = middle  # a removed layer passes on its input
        elif torch.equal(behind.to(out.device), out):
            finished = out
        else:
            finished, reached = self.compressed.finish(layer, ids, h, middle)
        errors = difference(changed, (h, middle, out))
        self.sums.add_layer(2 * layer, (errors[0], errors[1]), middle, (between, moved))
        self.sums.add_layer(2 * layer + 1, (errors[1], errors[2]), out, (finished, moved_out))
        self.sums.off[2 * layer] += float(difference([reached], [middle])[0].square().sum())

    def result(self, rounding: float) -> SublayerErrors | None:
        """The result; None if no layer can be split."""
        if not any(self.kinds):
            return None
        s = self.sums
        off = np.sqrt(s.off / s.size[1:])
        return SublayerErrors(self.kinds, s.size, s.error, s.energy, s.along, off, rounding)
