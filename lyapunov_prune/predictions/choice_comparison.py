"""What a comparison of two models on multiple-choice items has measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lyapunov_prune.predictions.spaces import kl_divergence
from lyapunov_prune.results.frames import columns, pd
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Result

Scores = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ChoiceComparison(Result):
    """Multiple choice with a dense and a compressed model, one row per item.

    `dense` and `compressed` hold `log P(choice | query)` of every choice in nats, summed over its tokens. `characters`
    is the length of each choice, by which `acc_norm` of lm-evaluation-harness divides. A model chooses the largest
    score. (The harness counts white space at the end of a query as part of every choice; here it belongs to the query,
    so `acc_norm` of such items differs.) The other arrays are (items,) float64, measured at the position that predicts
    the first token of the answer:

    - `dense_mass`, `compressed_mass`: total probability of the first tokens of all choices (Demystifying When Pruning
      Works via Representation Hierarchies, §7.2);
    - `same_top`, bool: both models have the same most likely token;
    - `options_logit`, `options_probability`, `options_kl`: over the first tokens of the choices, `1 − cos` of the
      logits, `1 − cos` of the renormalised probabilities, and their `KL(p‖q)` in nats. NaN where all choices begin with
      the same token;
    - `kl`: `KL(p‖q)` over the whole vocabulary. NaN where the vocabularies differ in size;
    - `radius`: among the first tokens, the one of largest logit provably stays the largest while the input of the head
      moves by less than this (`argmax_unchanged_of_row_difference`); `radius_of_norms`: the weaker radius of
      `argmax_unchanged_of_state_error`; `moved`: how far the input moved; `changed`: 1 where the largest token changed.
      NaN where all choices begin with the same token, and where the theorems do not apply: the heads differ, or the
      logits are more than a matrix times the state.
    """

    dense: Scores
    compressed: Scores
    characters: Scores
    gold: tuple[int, ...]
    dense_mass: np.ndarray
    compressed_mass: np.ndarray
    same_top: np.ndarray
    options_logit: np.ndarray
    options_probability: np.ndarray
    options_kl: np.ndarray
    kl: np.ndarray
    radius: np.ndarray
    radius_of_norms: np.ndarray
    moved: np.ndarray
    changed: np.ndarray
    compressed_model: ModelIdentity
    measured_on: MeasuredOn

    def chosen(self, which: str, *, per_character: bool = False) -> np.ndarray:
        """(items,) index of the choice that `dense` or `compressed` takes; the first one on a tie."""
        return np.array([int(np.argmax(row)) for row in self._scores(which, per_character)])

    def accuracy(self, which: str, *, per_character: bool = False) -> float:
        """`acc` of lm-evaluation-harness; with `per_character` its `acc_norm`, if no query ends in white space."""
        return float((self.chosen(which, per_character=per_character) == self.gold).mean())

    def survival(self, *, per_character: bool = False) -> float:
        """Share of items for which both models take the same choice, right or wrong."""
        first, second = (self.chosen(which, per_character=per_character) for which in ("dense", "compressed"))
        return float((first == second).mean())

    def text_kl(self, *, per_character: bool = False) -> np.ndarray:
        """(items,) nats: KL divergence between the softmax of the scores of both models over the choices."""
        found = []
        for pair in zip(*(self._scores(which, per_character) for which in ("dense", "compressed")), strict=True):
            log_p, log_q = (torch.from_numpy(row).log_softmax(-1) for row in pair)
            found.append(float(kl_divergence(log_p, log_q)))
        return np.array(found)

    def lead(self) -> np.ndarray:
        """(items,) margin of the largest over the second log-likelihood per character of the dense model."""
        return np.array([np.subtract(*np.sort(row)[:-3:-1]) for row in self._scores("dense", per_character=True)])

    def shift(self) -> np.ndarray:
        """(items,) range over the choices of the change of the log-likelihood per character.

        Below `lead`, the choice stays.
        """
        pairs = zip(*(self._scores(which, per_character=True) for which in ("dense", "compressed")), strict=True)
        return np.array([np.ptp(second - first) for first, second in pairs])

    def _scores(self, which: str, per_character: bool) -> list[np.ndarray]:
        """The scores of every item's choices, divided by their lengths with `per_character`."""
        scores: Scores = getattr(self, which)
        pairs = zip(scores, self.characters, strict=True)
        return [np.array(row) / (np.array(length) if per_character else 1) for row, length in pairs]

    def favourite(self, which: str) -> tuple[int, float]:
        """The position that the model chooses most often, and the share of items in which it does."""
        places, counts = np.unique(self.chosen(which), return_counts=True)
        return int(places[counts.argmax()]), float(counts.max() / counts.sum())

    @property
    def certified(self) -> np.ndarray:
        """Items for which the theorem proves that the top token among the options stays the same."""
        return self.moved < self.radius

    @property
    def violations(self) -> tuple[int, ...]:
        """Certified items whose top token changed nevertheless; must be empty."""
        return tuple(int(i) for i in np.flatnonzero(self.certified & (self.changed > 0)))

    def to_frame(self) -> pd.DataFrame:
        chosen = {which: self.chosen(which) for which in ("dense", "compressed")}
        return pd.DataFrame(
            {
                "item": np.arange(len(self.gold)),
                "gold": self.gold,
                **chosen,
                **columns(self, "dense_mass", "compressed_mass"),
                "same_top": self.same_top > 0,
                **columns(self, "options_logit", "options_probability", "options_kl", "kl"),
                **columns(self, "radius", "radius_of_norms", "moved", "certified"),
            }
        )

    def summary(self) -> pd.DataFrame:
        """One row per model. `error` is the standard error of `accuracy` over items."""
        rows = []
        for which, mass in (("dense", self.dense_mass), ("compressed", self.compressed_mass)):
            accuracy = self.accuracy(which)
            error = np.sqrt(accuracy * (1 - accuracy) / (len(self.gold) - 1)) if len(self.gold) > 1 else np.nan
            rows.append((which, accuracy, error, self.accuracy(which, per_character=True), mass.mean()))
        return pd.DataFrame(rows, columns=["model", "accuracy", "error", "accuracy_per_character", "options_mass"])

    def headline(self) -> str:
        decided = int(np.isfinite(self.moved).sum())
        fewer = int((self.moved < self.radius_of_norms).sum())
        proven = (
            f"top option proven unchanged: {int(self.certified.sum())} of {decided} items "
            f"({fewer} by the row norms alone), "
            f"{int((self.changed > 0).sum())} changed, {len(self.violations)} of them proven unchanged"
            if decided
            else "no proof: the models do not share a linear head, or all options begin with the same token"
        )
        return (
            f"Multiple choice, {len(self.gold)} items, against {self.compressed_model.name}: "
            f"same choice in {self.survival():.1%} ({self.survival(per_character=True):.1%} by log-likelihood "
            f"per character), same top-1 token in {self.same_top.mean():.1%}\n"
            f"{self._spaces()}\n{proven}\n{self.measured_on.line()}"
        )

    def _spaces(self) -> str:
        place, share = self.favourite("dense")
        told = np.isfinite(self.options_kl)
        among = (
            f"among the options' first tokens KL {self.options_kl[told].mean():.3g} and 1 − cos "
            f"{self.options_logit[told].mean():.3g} of logits, {self.options_probability[told].mean():.3g} of "
            f"probabilities, over the vocabulary KL {self.kl[told].mean():.3g}, in {int(told.sum())} items; "
            if told.any()
            else ""
        )
        return f"{among}the dense model takes choice {place + 1} in {share:.0%}"
