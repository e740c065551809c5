"""A decision as an object: which layers, parts of layers or channels to remove, why, and from which measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError, first_of, printable
from lyapunov_prune.models.decoder import Decoder, Identified, takes_identity
from lyapunov_prune.profiles.contraction_profile import dtype_note, floor_note
from lyapunov_prune.pruning.removed import ChannelsGone, ExpertsGone, LayersGone, PartsGone
from lyapunov_prune.results.arrays import require_array, require_fitting, require_layers
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import ROWS, MeasuredOn, ModelIdentity, Result

# A kept layer with at least this selection frequency is named.
OFTEN = 0.1


@dataclass(frozen=True)
class PruningPlan(Result):
    """What to remove from a model (`gone`, one of the kinds of `removed`), with the reasons.

    Indices are those of the original model. `scores` holds the score of every layer (smallest removed first), NaN if
    there is nothing to remove; it is empty for a choice by hand. If they rest on ρ, `below_floor` holds the layers
    whose ρ is rounding (`ContractionProfile.below_floor`). `picked` (L,) is the selection frequency of each layer over
    bootstrap draws of the windows and of the seeds of ρ; None if unknown. `tied` holds the last removed and the first
    kept layer if their scores are equal up to rounding.

    Raises LyapunovPruneError if the model lacks something that is named, and if nothing would be removed or no layer
    left.
    """

    gone: LayersGone | ChannelsGone | ExpertsGone | PartsGone
    criterion: str
    alpha: float | None
    scores: np.ndarray
    model: ModelIdentity
    measured_on: tuple[MeasuredOn, ...]
    below_floor: tuple[int, ...] = ()
    picked: np.ndarray | None = None
    tied: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        layers = self.model.num_layers
        object.__setattr__(self, "gone", self.gone.fitted(self.model))
        require_array("plan, scores", self.scores, (layers if len(self.scores) else 0,), least=-np.inf, finite=False)
        require_layers("plan, below_floor", self.below_floor, layers)
        require_layers("plan, tied", self.tied, layers)
        require_fitting(len(self.tied) in (0, 2), f"plan, tied: two layers have one score, not {len(self.tied)}")
        if self.picked is not None:
            require_array("plan, picked", self.picked, (layers,), most=1.0)
        wrong = {
            "the plan removes no layer; name one or more": not self.touched,
            f"{len(self.remove)} layers to remove, but {self.model.name} has {layers}; keep at least one": (
                len(self.remove) >= layers
            ),
        }
        if why := first_of(wrong):
            raise LyapunovPruneError(why)

    @classmethod
    @takes_identity
    def given(cls, model: Identified, gone: Sequence[int] | LayersGone) -> PruningPlan:
        """A plan for what was chosen by hand: whole layers, or what one of the kinds of `removed` names."""
        gone = gone if isinstance(gone, LayersGone) else LayersGone(tuple(gone))
        return cls(gone, "given", None, np.empty(0), model, ())

    @property
    def remove(self) -> tuple[int, ...]:
        """The whole layers that go."""
        return self.gone.remove

    @property
    def kept(self) -> tuple[int, ...]:
        """The original index of every layer of the pruned model, in order."""
        return tuple(i for i in range(self.model.num_layers) if i not in self.remove)

    @property
    def touched(self) -> tuple[int, ...]:
        """Every layer that is removed, or loses a part."""
        return self.gone.touched

    @property
    def drops_parts(self) -> bool:
        """Whether layers that stay lose parts."""
        return type(self.gone) is not LayersGone

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
        if isinstance(self.gone, PartsGone):
            raise LyapunovPruneError(
                "a plain checkpoint holds every part of a kept layer; format 'compact' can lack "
                "attentions and activations; or remove whole layers"
            )

    def to_frame(self) -> pd.DataFrame:
        """One row a layer: its score, its rank (1 goes first), whether it or a part of it is removed."""
        layers = np.arange(self.model.num_layers)
        frame = pd.DataFrame({"layer": layers, "removed": np.isin(layers, self.remove)} | self.gone.columns(layers))
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
        removed = "; ".join(self.gone.told(self.model, self.criterion + blend))
        half = dtype_note(self.measured_on) if len(self.scores) else ""
        return printable(f"Remove {removed}{floor_note(self.below_floor)}{half}")


def as_plan(decoder: Decoder, plan: PruningPlan | Sequence[int]) -> PruningPlan:
    """`plan`, or a plan for a plain list of indices; raises LyapunovPruneError unless it fits the model."""
    if not isinstance(plan, PruningPlan):
        return PruningPlan.given(decoder.identity, plan)
    plan.require_model(decoder.identity)
    return plan
