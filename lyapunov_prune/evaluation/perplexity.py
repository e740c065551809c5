"""Perplexity over non-overlapping windows, each scored on its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from lyapunov_prune.arguments import Count
from lyapunov_prune.evaluation.judging import POWER, compare
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.hooks import require_finite
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.forward.scoring import Sum, loss_sum, mean_over
from lyapunov_prune.models.decoder import Streamable, runs_model
from lyapunov_prune.progress import track
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.wording import between, number
from lyapunov_prune.results.worth import Ratio, Worth


@dataclass(frozen=True)
class Perplexity(Result):
    """`exp(nll)`, with `nll` the mean negative log-likelihood in nats over `scored` tokens, float64.

    `windows` holds the mean per window, in the order of the text; intervals are those of `judging.compare`.
    """

    nll: float
    scored: int
    windows: np.ndarray
    measured_on: MeasuredOn

    @property
    def value(self) -> float:
        return float(np.exp(self.nll))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the perplexity from the variation over the text; NaN for fewer than four windows."""
        return interval_of(self.windows)

    def ratio_to(self, reference: Perplexity) -> Ratio:
        """`value / reference.value` and its 95 % interval, paired by window, so that hard windows cancel."""
        return Ratio(self.value / reference.value, *interval_of(self.windows - reference.windows))

    def to_frame(self) -> pd.DataFrame:
        low, high = self.interval
        row = {"perplexity": self.value, "low": low, "high": high, "tokens": self.scored}
        return pd.DataFrame([row])

    def headline(self) -> str:
        return self.measured_on.line()

    def answer(self) -> list[str]:
        name, windows = self.measured_on.model.name, len(self.windows)
        return [
            f"{name}: perplexity {number(self.value)} ({between(*self.interval)}) over {windows} windows.",
            self.measured_on.line(),
        ]

    def worth(self, reference: Perplexity, speed: str = "") -> Worth:
        """What a card says of this model, made from the one of `reference`."""
        on = self.measured_on
        return Worth(self.value, self.ratio_to(reference), f"{on.text} ({on.split})", on.tokens, speed)

    def against(self, reference: Perplexity) -> str:
        """One line: this model beside `reference` on the same windows, and whether they differ significantly."""
        ratio, low, high = self.ratio_to(reference)
        told = f"fewer than {POWER} windows cannot tell whether that is chance"
        if math.isfinite(low) and math.isfinite(high):
            word = "worse" if low > 1 else "better" if high < 1 else "no significant difference on this text"
            told = f"{between(low, high, 4)}, paired by window: {word}"
        return (
            f"{self.measured_on.model.name}: perplexity {number(self.value)}, {ratio:.4g} × that of "
            f"{reference.measured_on.model.name}, {number(reference.value)} ({told})."
        )


def of_windows(reading: Reading, total: Sum, batch_size: int, description: str) -> torch.Tensor:
    """Per window, the mean over its tokens (except the first) of what `total` sums (`scoring.mean_over`)."""

    def means(first: int, ids: torch.Tensor) -> list[torch.Tensor]:
        windows = list(zip(reading.logits(ids), ids, strict=True))
        each = track(windows, description) if reading.decoder.stream is not None else windows
        return [mean_over(blocks, targets[1:], total) for blocks, targets in each]

    return torch.stack([mean for some in dealt(reading, batch_size, means, description) for mean in some])


def require_finite_losses(reading: Reading, losses: np.ndarray) -> None:
    """Raise for the first window with a loss that is not finite: NonFiniteError if a layer can be named."""
    bad, batch = int(np.argmin(np.isfinite(losses))), reading.batch
    require_finite(reading.structure, batch.ids[bad : bad + 1], f"window {bad} of {batch.text}", losses[bad : bad + 1])


def interval_of(nll: np.ndarray) -> tuple[float, float]:
    """Exponential of the 95 % interval of the mean over windows in the order of their text (`judging.compare`)."""
    told = compare(np.zeros(len(nll)), nll)
    with np.errstate(over="ignore"):  # losses of a broken model may be huge
        return (float(np.exp(told.low)), float(np.exp(told.high)))


def ratio_of(rise: np.ndarray) -> Ratio:
    """The ratio of perplexities where the loss of every window rises by `rise` (windows,), nats a token."""
    with np.errstate(over="ignore"):
        return Ratio(float(np.exp(rise.mean())), *interval_of(rise))


@runs_model
def perplexity(
    model: Streamable, batch: Readable, *, batch_size: Count = 1, description: str = "perplexity"
) -> Perplexity:
    """Perplexity of `model` on windows × context ids, each window on its own, its first token unscored.

    Log-likelihoods are computed in float32 from the model's own logits (`of_windows`) and summed in float64. Raises
    NonFiniteError naming the layer when a loss is not finite, and LyapunovPruneError for ids outside the vocabulary or
    windows longer than the context.
    """
    reading = read(model, batch)
    return perplexity_of(reading, of_windows(reading, loss_sum, batch_size, description).numpy())


def perplexity_of(reading: Reading, windows: np.ndarray) -> Perplexity:
    """The perplexity from the mean loss of every window of `reading`: (windows,) float64, nats. Raises like it."""
    require_finite_losses(reading, windows)
    batch = reading.batch
    return Perplexity(
        nll=float(windows.mean()),
        scored=batch.ids.shape[0] * (batch.context - 1),
        windows=windows,
        measured_on=reading.measured_on(),
    )
