"""Which kinds of task a compression spares: multiple choice and generation, with the same three questions.

In which space is the task decided? How far did that space move, and how far may it move? Does the error grow through
the generated text? All numbers come from measurements made elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lyapunov_prune.arguments import checked
from lyapunov_prune.predictions.choice_comparison import ChoiceComparison
from lyapunov_prune.predictions.generation import GenerationDivergence
from lyapunov_prune.predictions.history import HistoryDivergence
from lyapunov_prune.results.frames import columns, pd
from lyapunov_prune.results.result import LINES, MeasuredOn, ModelIdentity, Result

# Thresholds on the interval of the share of unchanged decisions.
STAYS, LOST = 0.9, 0.5
_Z = 1.959963984540054


@dataclass(frozen=True)
class KindVerdict:
    """The answers for one kind of task, from `items` questions or prompts.

    - `space`: where the task is decided; `distance`: how far that space moved, described by `distance_of`;
    - `moved` and `may_move`: how far the deciding quantity moved and how far it may move before the decision can
      change, in the unit `unit`; medians over items (over steps for generation); `certain`: share of decisions with
      `moved < may_move`;
    - `same`: share of unchanged decisions, with its 95 % Wilson interval `low` to `high` over items;
    - `dense`, `compressed`: the score of the task; NaN if unknown;
    - `returns`: factor by which the error grows when the model reads its own text; NaN for tasks decided in one
      reading, and where there is no error.
    """

    task: str
    space: str
    items: int
    distance: float
    distance_of: str
    moved: float
    may_move: float
    unit: str
    certain: float
    same: float
    low: float
    high: float
    score: str = ""
    dense: float = np.nan
    compressed: float = np.nan
    returns: float = np.nan

    @property
    def word(self) -> str:
        """`stays` if the interval lies at or above 0.9, `lost` if it lies below 0.5, otherwise `changes`."""
        return "stays" if self.low >= STAYS else "lost" if self.high < LOST else "changes"

    def short(self) -> str:
        scored = f"; {self.score} {self.dense:.3g} → {self.compressed:.3g}" if self.score else ""
        return (
            f"{self.task}: {self.word}. {self.same:.0%} of the decisions stay ({self.low:.0%} to {self.high:.0%}, "
            f"{self.items} items){scored}."
        )

    def sentence(self) -> str:
        scored = f"; {self.score} {self.dense:.3g} → {self.compressed:.3g}" if self.score else ""
        if self.task != "generation":
            again = "decided in one reading, so no error returns through generated text"
        elif np.isnan(self.returns):
            again = "there is no error to grow through its own text"
        else:
            again = f"reading its own text multiplies KL by {self.returns:.3g}"
        return (
            f"{self.task}: {self.word}. Decided in the {self.space}: {self.distance_of} {self.distance:.3g}. The "
            f"deciding quantity moved by {self.moved:.3g} {self.unit} and may move by {self.may_move:.3g} (medians), "
            f"certain in {self.certain:.0%}. {self.same:.0%} of the decisions are unchanged "
            f"({self.low:.0%} to {self.high:.0%}, {self.items} items){scored}; {again}"
        )


@dataclass(frozen=True)
class Verdict(Result):
    """`KindVerdict` of every kind of task that was measured with the same two models.

    `word` depends only on the interval of the share of unchanged decisions among the measured items; it says nothing
    about other tasks of the kind. `certain` counts decisions that the margin settles; others may be unchanged too.
    Source of the questions: Demystifying When Pruning Works via Representation Hierarchies, §8.
    """

    kinds: tuple[KindVerdict, ...]
    compressed: ModelIdentity
    measured_on: MeasuredOn

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            [
                {
                    "task": k.task,
                    "verdict": k.word,
                    "decided in": k.space,
                    **columns(k, "distance", "moved"),
                    "may move": k.may_move,
                    **columns(k, "certain", "same", "low", "high", "dense", "compressed"),
                    "returns ×": k.returns,
                    "items": k.items,
                }
                for k in self.kinds
            ]
        )

    @property
    def _chose(self) -> bool:
        return any(k.task == "choice" for k in self.kinds)

    def answer(self) -> list[str]:
        lines = [f"{self.compressed.name} against {self.measured_on.model.name}:", *(k.short() for k in self.kinds)]
        if not self._chose:
            lines.append("Not asked: choice.")
        return [*lines, "Other tasks of a kind may fare otherwise: measure your own."][:LINES]

    def headline(self) -> str:
        missing = [] if self._chose else ["choice was not measured; give --choices FILE"]
        return "\n".join(
            [
                f"Verdict on {self.compressed.name} by kind of task: stays if the interval of the share of "
                f"unchanged decisions begins at {STAYS:.0%} or above, lost if it ends below {LOST:.0%}",
                *(k.sentence() for k in self.kinds),
                *missing,
                self.measured_on.line(),
            ]
        )


@checked
def task_verdict(
    generation: GenerationDivergence, history: HistoryDivergence, *, choices: ChoiceComparison | None = None
) -> Verdict:
    """Combine the measurements of two models to a Verdict.

    Choice compares the shift of log-likelihoods per character with the lead of the largest.
    Generation compares `KL(p‖q)` on the dense text with `(p₁ − p₂)²/2`, below which Pinsker's inequality keeps the most
    likely token; its unchanged share is the share of the dense continuation before the texts differ
    (`GenerationDivergence.kept`).

    Raises LyapunovPruneError when the measurements are of different models.
    """
    identities = [generation.measured_on.model, generation.compressed]
    pairs = [[history.measured_on.model, history.compressed]]
    kinds = []
    if choices is not None:
        pairs.append([choices.measured_on.model, choices.compressed_model])
        kinds.append(_choice(choices))
    for pair in pairs:
        for one, other in zip(identities, pair, strict=True):
            one.require(other, "a measurement", "give those of one pair of models")
    kinds.append(_generation(generation, history))
    return Verdict(tuple(kinds), generation.compressed, generation.measured_on)


def _choice(found: ChoiceComparison) -> KindVerdict:
    n = len(found.gold)
    shift, lead = found.shift(), found.lead()
    same = found.survival(per_character=True)
    low, high = wilson(same, n)
    return KindVerdict(
        task="choice",
        space="subspace of the options",
        items=n,
        distance=float(found.text_kl(per_character=True).mean()),
        distance_of="KL among the options, nats a character,",
        moved=float(np.median(shift)),
        may_move=float(np.median(lead)),
        unit="nats a character",
        certain=float((shift < lead).mean()),
        same=same,
        low=low,
        high=high,
        score="accuracy",
        dense=found.accuracy("dense", per_character=True),
        compressed=found.accuracy("compressed", per_character=True),
    )


def _generation(found: GenerationDivergence, history: HistoryDivergence) -> KindVerdict:
    n = len(found.dense_tokens)
    same = float(found.kept.mean())
    low, high = wilson(same, n)
    seen = history.running > 0
    direct, own = history.mean_kl()
    return KindVerdict(
        task="generation",
        space="whole distribution",
        items=n,
        distance=direct,
        distance_of="KL on the dense text, nats a token,",
        moved=float(np.median(history.kl[0, seen])),
        may_move=float(np.median(history.may_spend[seen])),
        unit="nats a token",
        certain=float(np.average(history.certain[0, seen], weights=history.running[seen])),
        same=same,
        low=low,
        high=high,
        returns=own / direct if direct > 0 else float("nan"),
    )


def wilson(mean: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a mean of numbers in [0, 1], whose variance is at most `mean (1 − mean)`."""
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * np.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return float(max(0.0, centre - half)), float(min(1.0, centre + half))
