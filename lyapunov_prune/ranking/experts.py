"""Scores of the experts of every layer, and the plan that removes the same number from each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Integral

import numpy as np

from lyapunov_prune.arguments import Amount, checked
from lyapunov_prune.forward.masking import masked_experts
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.models.mixtures import Router
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.predictions.divergence import divergences_of
from lyapunov_prune.profiles.expert_use import ExpertUse, expert_use
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import ExpertsGone
from lyapunov_prune.ranking.counts import count_of
from lyapunov_prune.ranking.ranking import Ranking
from lyapunov_prune.results.arrays import require_array
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.wording import ranges


@dataclass(frozen=True)
class ExpertRanking(Ranking):
    """A score for every expert, (L, E) float64, the smallest of each layer removed first; NaN in layers without.

    Experts that got no token are removed before all others, whatever their score. `use` holds how the router uses each
    expert, `router` how it chooses among them.
    """

    criterion: str
    scores: np.ndarray
    use: ExpertUse
    router: Router
    what: str = "experts"

    def __post_init__(self) -> None:
        require_array("ranking, scores", self.scores, self.use.tokens.shape, least=-np.inf, finite=False)

    @property
    def measured_on(self) -> tuple[MeasuredOn, ...]:
        return (self.use.measured_on,)

    def order(self, layer: int) -> list[int]:
        """The experts of `layer` from the first to remove to the last; equal scores keep their order."""
        return np.lexsort((self.scores[layer], self.use.tokens[layer] > 0)).tolist()

    @checked
    def plan(self, remove: Amount) -> PruningPlan:
        """The plan that removes `remove` experts of every layer, or that share of them, the same number of each group.

        A share is rounded to what the groups of the router allow. Raises LyapunovPruneError if so many cannot be
        removed, with the largest possible number.
        """
        return PruningPlan(
            gone=ExpertsGone((), *self._first(count_of_experts(self.router, remove))),
            criterion=self.criterion,
            alpha=None,
            scores=np.empty(0),
            model=self.use.measured_on.model,
            measured_on=self.measured_on,
        )

    def _first(self, count: int) -> tuple[dict[int, tuple[int, ...]], np.ndarray]:
        """The first `count` experts of every layer, and the share of the router's weight that they have."""
        gone: dict[int, tuple[int, ...]] = {}
        routed, share = np.full(len(self.scores), np.nan), self.use.share(self.use.weight)
        for layer in self.use.layers:
            first = [group[: count // self.router.groups] for group in self.router.groups_of(self.order(layer))]
            gone[layer] = tuple(sorted(expert for group in first for expert in group))
            routed[layer] = share[layer, list(gone[layer])].sum()
        return gone, routed

    def to_frame(self) -> pd.DataFrame:
        """One row an expert, by layer in the order of removal: score, shares of tokens and of router weight."""
        order = [(layer, expert) for layer in self.use.layers for expert in self.order(layer)]
        layers, experts = np.array(order).T
        frame = pd.DataFrame(
            {"layer": layers, "rank": np.tile(np.arange(1, self.router.experts + 1), len(self.use.layers))}
        )
        frame["expert"], frame["score"] = experts, self.scores[layers, experts]
        for name, values in (("tokens", self.use.tokens), ("weight", self.use.weight)):
            frame[name] = self.use.share(values)[layers, experts]
        return frame

    def headline(self) -> str:
        name = self.use.measured_on.model.name
        return f"Experts of {name} by {self.criterion}, first to remove first in every layer"

    def answer(self) -> list[str]:
        lines = [f"{self.headline()}: {self.router.experts} in each of {len(self.use.layers)} layers."]
        for part in (4, 2):
            count = self.router.groups * (self.router.experts // self.router.groups // part)
            if 1 <= count <= self.router.most:
                _, routed = self._first(count)
                most = int(np.nanargmax(routed))
                lines.append(
                    f"Without {count} of each goes {np.nanmean(routed):.1%} of the router's weight, at most "
                    f"{routed[most]:.1%} (layer {most})."
                )
        if unused := self.use.unused:
            number = sum(map(len, unused.values()))
            lines.append(
                f"{number} experts got none of {self.use.measured_on.tokens} tokens, and go first: in layers "
                f"{ranges(unused)}. More text may reach them."
            )
        lines.append("A score orders the experts of one layer; it says neither how many can go nor what they cost.")
        return lines


def count_of_experts(router: Router, remove: int | float) -> int:
    """`remove` as a number of experts per layer; a share is rounded to the same number of each router group.

    Raises LyapunovPruneError if so many cannot be removed, with the largest possible number.
    """
    share = not isinstance(remove, Integral)
    count = count_of(remove, router.experts // router.groups if share else router.experts)
    count *= router.groups if share else 1
    router.require_removed(count)
    return count


def rank_experts(
    reading: Reading, criterion: str, score: Callable[[ExpertUse], np.ndarray], batch_size: int
) -> ExpertRanking:
    """Measure how the router uses the experts, and rank them by a `score` (L, E) of that."""
    use = expert_use(reading.decoder, reading, batch_size=batch_size)
    return ExpertRanking(criterion, score(use), use, reading.decoder.mixtures.router)


@in_eval_mode
def masked_divergence(reading: Reading, temperature: float, batch_size: int) -> np.ndarray:
    """KL(p‖q) in nats, (L, E): `p` is the dense prediction, `q` the one with that expert's router logit set to −∞.

    It is the mean over every position of a window but its last, NaN in layers without experts. Every forward starts at
    the input state of its layer; memory is that of `skip_divergence` for the experts of one layer.
    """
    mixtures = reading.decoder.mixtures
    kl = np.full((reading.structure.num_layers, mixtures.router.experts), np.nan)
    for layer in mixtures.layers:
        changes = [
            (layer, partial(masked_experts, reading.decoder, {layer: (expert,)}))
            for expert in range(mixtures.router.experts)
        ]
        means = divergences_of(reading, changes, temperature, batch_size, f"experts of layer {layer}")
        kl[layer] = means[:, 1]
    return kl
