"""Time saved by removing an attention and by merging a block: three models timed in turn, and a plane through them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.data.examples import Examples
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.speed import now
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import track
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

REPEATS = 9


@dataclass(frozen=True)
class Times(Result):
    """Median seconds of the forward of one item for three compact models.

    The dense model, one without `most[0]` attentions, and one with all `most[1]` feed-forward blocks merged. Other
    pairs are interpolated on the plane `dense − n_a (dense − attention)/most[0] − n_g (dense − activation)/most[1]`, an
    estimate used to choose what to remove. The forward of a text is its prefill.
    """

    layers: int
    most: tuple[int, int]
    dense: float
    attention: float
    activation: float
    threads: int
    measured_on: tuple[MeasuredOn, ...]

    @property
    def saved(self) -> tuple[float, float]:
        """Seconds saved by one attention and by one merge; 0 if noise makes the difference negative."""
        a = (self.dense - self.attention) / max(self.most[0], 1)
        return max(a, 0.0), max((self.dense - self.activation) / self.most[1], 0.0)

    def table(self) -> np.ndarray:
        """Seconds of all pairs, (L + 1, L + 1); NaN for pairs that cannot be removed."""
        n_a, n_g = np.indices((self.layers + 1, self.layers + 1))
        seconds = self.dense - n_a * self.saved[0] - n_g * self.saved[1]
        seconds[(n_a > self.most[0]) | (n_g > self.most[1])] = np.nan
        if (seconds <= 0).any():
            raise LyapunovPruneError(
                "the times of the compact models are too noisy: together they save more than the dense time; "
                "time on a quiet machine"
            )
        return seconds

    def to_frame(self) -> pd.DataFrame:
        names = ["dense", f"without {self.most[0]} attentions", f"without {self.most[1]} activations"]
        seconds = np.array([self.dense, self.attention, self.activation])
        return pd.DataFrame({"model": names, "seconds": seconds, "speed-up": self.dense / seconds})

    def headline(self) -> str:
        return f"Forwards of one item, {self.threads} threads, medians of {REPEATS}"


@in_eval_mode
def _timed(models: list[PreTrainedModel], inputs: torch.Tensor) -> list[float]:
    seconds: list[list[float]] = [[] for _ in models]
    for turn in track(range(REPEATS + 1), "times"):
        for place, model in enumerate(models):
            began = now(model)
            uncached_logits(model, inputs)
            if turn:  # the first round is warm-up
                seconds[place].append(now(model) - began)
    return [float(np.median(row)) for row in seconds]


def measure_times(student: Unmerged, examples: Examples, most: tuple[int, int]) -> Times:
    """Time the model of `student` and two cut versions on the first of `examples`, in turn, REPEATS rounds."""
    model, L = student.model, len(student.blocks)
    merged = make_compact(model, Cuts(merged=student.merged(range(most[1]))))
    bare = make_compact(model, Cuts(attention=tuple(range(L - most[0], L)))) if most[0] else model
    dense, attention, activation = _timed([model, bare, merged], examples.item(0).unsqueeze(0).to(model.device))
    about = (examples.measured_on(model),)
    return Times(L, most, dense, attention, activation, torch.get_num_threads(), about)
