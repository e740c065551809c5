"""A decision as an object: which layers, parts of layers or channels to remove, why, and from which measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError, printable
from lyapunov_prune.models.decoder import Decoder, Identified, takes_identity
from lyapunov_prune.profiles.contraction_profile import dtype_note, floor_note
from lyapunov_prune.pruning.removed import Removed, require_channels, require_experts, require_reduction
from lyapunov_prune.results.arrays import each_once, require_array, require_fitting, require_layers
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import ROWS, MeasuredOn, ModelIdentity, Result

# What a plan can remove, and the field that lists the layers, or the channels or experts of every layer.
FIELDS = {
    "layers": "remove",
    "attention": "drop_attention",
    "mlp": "drop_mlp",
    "activation": "drop_activation",
    "width": "channels",
    "experts": "experts",
}
T = TypeVar("T")
_LISTS = ("remove", "drop_attention", "drop_mlp", "drop_activation")  # the fields that list layers
# A kept layer with at least this selection frequency is named.
OFTEN = 0.1


@dataclass(frozen=True)
class PruningPlan(Removed, Result):
    """The layers to remove and those to lose their attention, MLP or activation only (ascending), with the reasons.

    Indices are those of the original model. Without its activation a feed-forward block becomes one linear map by
    `reduction`, a name of `merging.table.REDUCTIONS`; it is None if no activation is removed. `scores` holds the score
    of every layer (smallest removed first), NaN if there is nothing to remove; it is empty for a choice by hand. If
    they rest on ρ, `below_floor` holds the layers whose ρ is rounding (`ContractionProfile.below_floor`). `picked` (L,)
    is the selection frequency of each layer over bootstrap draws of the windows and of the seeds of ρ; None if unknown.
    `tied` holds the last removed and the first kept layer if their scores are equal up to rounding.
    `channels[l][j]` lists the hidden channels that leave unit j of layer l (a feed-forward block, or one expert:
    `models.units.find_units`), of the `widths[l][j]` that it has. It is empty for a unit that keeps all of its channels
    and in a removed layer. All units of one width that lose some lose the same number.

    `experts` lists the experts to remove from every layer, ascending: the same number from each kept mixture, none from
    other layers; it is empty if all experts stay. `routed` (L,) is the share of the router's weight that those experts
    had on the text, NaN if none is removed; None if it was not measured.

    Raises LyapunovPruneError if an index is repeated or out of range, if a part of a removed layer or the activation of
    a dropped MLP is named, for activations without a known reduction or a reduction without them, for channels or
    experts that differ in number between layers, and if nothing would be removed or no layer left.
    """

    remove: tuple[int, ...]
    criterion: str
    alpha: float | None
    scores: np.ndarray
    model: ModelIdentity
    measured_on: tuple[MeasuredOn, ...]
    drop_attention: tuple[int, ...] = ()
    drop_mlp: tuple[int, ...] = ()
    below_floor: tuple[int, ...] = ()
    drop_activation: tuple[int, ...] = ()
    reduction: str | None = None
    picked: np.ndarray | None = None
    tied: tuple[int, ...] = ()
    channels: tuple[tuple[tuple[int, ...], ...], ...] = ()
    widths: tuple[tuple[int, ...], ...] = ()
    experts: tuple[tuple[int, ...], ...] = ()
    routed: np.ndarray | None = None

    def __post_init__(self) -> None:
        layers = self.model.num_layers
        for field in _LISTS:
            object.__setattr__(self, field, each_once(f"plan, {field}", getattr(self, field), layers))
        require_experts(self.experts, self.routed, self.model, {*self.remove, *self.drop_mlp})
        count = layers if len(self.scores) else 0
        require_array("plan, scores", self.scores, (count,), least=-np.inf, finite=False)
        require_layers("plan, below_floor", self.below_floor, layers)
        require_layers("plan, tied", self.tied, layers)
        require_fitting(len(self.tied) in (0, 2), f"plan, tied: two layers have one score, not {len(self.tied)}")
        if self.picked is not None:
            require_array("plan, picked", self.picked, (layers,), most=1.0)
        parts = {*self.drop_attention, *self.drop_mlp, *self.drop_activation}
        twice = sorted(parts & set(self.remove) | set(self.drop_activation) & set(self.drop_mlp))
        narrower = bool(self.channels or self.widths)
        if narrower:
            require_channels(self.channels, self.widths, self.model, self.remove)
        require_reduction(self.drop_activation, self.reduction)
        why = ""
        if twice:
            why = f"layer {twice[0]} goes whole, or its MLP, and a part of it too; name it once"
        elif narrower and (self.drops_sublayers or self.experts_gone):
            why = (
                "channels can be combined only with whole layers; remove other parts first, then channels of the result"
            )
        elif not self.touched:
            why = "the plan removes no layer; name one or more"
        elif len(self.remove) >= layers:
            why = f"{len(self.remove)} layers to remove, but {self.model.name} has {layers}; keep at least one"
        if why:
            raise LyapunovPruneError(why)

    @classmethod
    @takes_identity
    def given(
        cls,
        model: Identified,
        remove: Sequence[int] = (),
        *,
        drop_attention: Sequence[int] = (),
        drop_mlp: Sequence[int] = (),
        drop_activation: Sequence[int] = (),
        reduction: str | None = None,
        experts: Mapping[int, Sequence[int]] | None = None,
    ) -> PruningPlan:
        """A plan for layers, sublayers, activations and experts (by layer) chosen by hand."""
        given = dict(experts or {})
        each_once("experts", tuple(given), model.num_layers)
        return cls(
            remove=tuple(remove),
            criterion="given",
            alpha=None,
            scores=np.empty(0),
            model=model,
            measured_on=(),
            drop_attention=tuple(drop_attention),
            drop_mlp=tuple(drop_mlp),
            drop_activation=tuple(drop_activation),
            reduction=reduction,
            experts=tuple(tuple(sorted(given.get(i, ()))) for i in range(model.num_layers)) if given else (),
        )

    def followed_by(self, further: PruningPlan) -> PruningPlan:
        """This plan of whole layers, and what `further` removes of the layers that stay: channels or experts."""
        if self.drops_parts or further.remove or not self.model.same_as(further.model):
            raise LyapunovPruneError(
                "one plan removes whole layers, the other channels or experts of the same model; give these two plans"
            )
        routed = further.routed
        if routed is not None:
            routed = np.where(np.isin(range(len(routed)), self.remove), np.nan, routed)

        def of_kept(lists: tuple[tuple[T, ...], ...]) -> tuple[tuple[T, ...], ...]:
            return tuple(() if layer in self.remove else each for layer, each in enumerate(lists))

        both = replace(
            self,
            criterion=f"{self.criterion}, then {further.criterion}",
            channels=of_kept(further.channels),
            widths=of_kept(further.widths),
            experts=of_kept(further.experts),
            routed=routed,
        )
        return both.seen_on(*further.measured_on)

    def require_model(self, identity: ModelIdentity) -> None:
        """Raise LyapunovPruneError unless the plan was made for this model."""
        identity.require(self.model, "this plan", "rank this model's layers again")

    def require_gaps(self) -> None:
        """Raise LyapunovPruneError unless whole layers go and nothing else does: gaps that can be mended."""
        if self.drops_parts:
            raise LyapunovPruneError(
                "mending closes the gaps of whole layers, and this plan drops parts of layers; leave those out, or the "
                "mending"
            )

    def require_plain(self) -> None:
        """Raise LyapunovPruneError if a layer loses a part that a plain model has in every layer."""
        if self.drops_sublayers:
            raise LyapunovPruneError(
                "a plain checkpoint holds every part of a layer that stays; give --format compact, which can lack "
                "attentions and activations, or remove whole layers"
            )

    def to_frame(self) -> pd.DataFrame:
        """One row a layer: its score, its rank (1 goes first), whether it or a part of it is removed."""
        layers = np.arange(self.model.num_layers)
        frame = pd.DataFrame({"layer": layers, "removed": np.isin(layers, self.remove)})
        if self.channels:
            frame["channels_removed"] = [sum(map(len, here)) for here in self.channels]
        elif self.drops_sublayers:
            frame["no_attention"] = np.isin(layers, self.drop_attention)
            frame["no_mlp"] = np.isin(layers, self.drop_mlp)
        if self.drop_activation:
            frame["no_activation"] = np.isin(layers, self.drop_activation)
        if self.experts:
            frame["experts"] = [" ".join(map(str, gone)) for gone in self.experts]
        if self.routed is not None:
            frame["routed"] = self.routed
        if len(self.scores):
            frame.insert(1, "score", self.scores)
            ranks = np.argsort(np.argsort(self.scores, kind="stable")) + 1
            frame.insert(2, "rank", pd.Series(ranks, dtype="Int64").mask(np.isnan(self.scores)))
        if self.picked is not None:
            frame["picked"] = self.picked
        if self.below_floor:
            frame["below_floor"] = np.isin(layers, self.below_floor)
        return frame

    def brief(self) -> pd.DataFrame:
        """What goes first by score, or what goes at all where the layers were given by hand."""
        frame = self.to_frame()
        return (frame.sort_values("rank") if "rank" in frame else frame[frame.layer.isin(self.touched)]).head(ROWS)

    def seen_on(self, *texts: MeasuredOn) -> PruningPlan:
        """This plan with `texts` among its own, each once: blocks were merged, or gaps mended or judged, on them."""
        known = {each.text_hash for each in self.measured_on}
        fresh: dict[str, MeasuredOn] = {}
        for text in texts:
            if text.text_hash not in known:
                fresh.setdefault(text.text_hash, text)
        return replace(self, measured_on=(*self.measured_on, *fresh.values())) if fresh else self

    def headline(self) -> str:
        return "\n".join(filter(None, (self.sentence(), self.stability())))

    def stability(self) -> str:
        """How firm the choice is, as far as it is known: of `picked`, of two scores that are one, of an end by `bi`."""
        lines = []
        if self.picked is not None:
            goes = self.touched
            often = np.argsort(-self.picked, kind="stable").tolist()
            also = [layer for layer in often if self.picked[layer] >= OFTEN and layer not in goes]
            chosen, others = (", ".join(f"{i} ({self.picked[i]:.0%})" for i in layers) for layers in (goes, also))
            rivals = f"; left, and picked as well: {others}" if also else ""
            lines.append(f"How often each is picked when the windows are resampled: {chosen}{rivals}")
        if self.tied:
            last, first = self.tied
            lines.append(f"Layers {last} and {first} have one score: that {last} goes is their order in the model")
        ends = [end for end in (0, self.model.num_layers - 1) if end in self.remove]
        if self.criterion == "bi" and ends:
            lines.append(
                f"Layer {ends[0]} is at an end of the model: wherever bi chose one, it was better with both ends kept "
                "(--protect 0,-1; experiments/2_criteria, one model)"
            )
        return "\n".join(lines)

    def sentence(self) -> str:
        """What goes and by what, in a line."""
        blend = f" (alpha {self.alpha:g})" if self.alpha is not None else ""
        parts = {
            "": self.remove,
            "the attention of ": self.drop_attention,
            "the MLP of ": self.drop_mlp,
            f"the activation (reduction {self.reduction}) of ": self.drop_activation,
        }
        removed = [
            f"{part}{len(indices)} of {self.model.num_layers} layers of {self.model.name} "
            f"by {self.criterion}{blend}: {', '.join(map(str, indices))}"
            for part, indices in parts.items()
            if indices
        ]
        half = dtype_note(self.measured_on) if len(self.scores) else ""
        if self.experts_gone:
            share = "" if self.routed is None else f", which had {np.nanmean(self.routed):.1%} of the router's weight"
            count = max(map(len, self.experts))
            removed.append(
                f"{count} expert{'s' * (count > 1)} of each of {len(self.experts_gone)} layers of {self.model.name} by "
                f"{self.criterion}{share}"
            )
        if gone := self.channels_gone:
            removed.append(
                f"{gone} of {self.width} hidden channels from each of "
                f"{sum(bool(block) for here in self.channels for block in here)} {self.narrowed}s of "
                f"{self.model.name} by {self.criterion}, of which {self.width - gone} stay"
            )
        return printable(f"Remove {'; '.join(removed)}{floor_note(self.below_floor)}{half}")


def as_plan(decoder: Decoder, plan: PruningPlan | Sequence[int]) -> PruningPlan:
    """`plan`, or a plan for a plain list of indices; raises LyapunovPruneError unless it fits the model."""
    if not isinstance(plan, PruningPlan):
        return PruningPlan.given(decoder.identity, plan)
    plan.require_model(decoder.identity)
    return plan
