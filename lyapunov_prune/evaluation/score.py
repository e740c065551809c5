"""Score of a model on each item of its data: windows of text, or images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Count, checked
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.examples import as_examples, model_inputs
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.perplexity import of_windows, require_finite_losses
from lyapunov_prune.forward.reading import read
from lyapunov_prune.forward.scoring import loss_sum
from lyapunov_prune.linalg import lift, require_numbers
from lyapunov_prune.models.decoder import InMemoryAny, runs_model, wrap
from lyapunov_prune.progress import track
from lyapunov_prune.results.frames import pd, rows
from lyapunov_prune.results.result import MeasuredOn, Result


@dataclass(frozen=True)
class ItemScores(Result):
    """Scores of every window of tokens or every image; arrays (items,), float64.

    `losses` are in nats: the mean over the tokens of a window except the first, or `−log p` of an image's class.
    `correct` is the share of a window's tokens that were the most likely next token, or 0 or 1 for an image.
    """

    losses: np.ndarray
    correct: np.ndarray
    measured_on: MeasuredOn

    @property
    def images(self) -> bool:
        return self.measured_on.images

    @property
    def items(self) -> np.ndarray:
        """The score of each item, with mean `value`: `−loss` for text, 0 or 1 for images."""
        return self.correct if self.images else -self.losses

    @property
    def value(self) -> float:
        """The score, higher is better: top-1 accuracy for images, `−loss` in nats per token for text."""
        return float(self.items.mean())

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy for images, share of correct next tokens for text."""
        return float(self.correct.mean())

    def to_frame(self) -> pd.DataFrame:
        return rows(self, "item", loss="losses", correct="correct")

    def summary(self) -> pd.DataFrame:
        return pd.DataFrame([{"score": self.value, "loss": self.loss, "accuracy": self.accuracy}])

    def headline(self) -> str:
        return self.measured_on.line()


@runs_model
def score(model: InMemoryAny, examples: TokenBatch | ImageBatch, *, batch_size: Count = 1) -> ItemScores:
    """Loss and accuracy of `model` on every item of `examples`, `batch_size` items per forward.

    A window of tokens is scored as in `perplexity`, its first token unscored; an image by its class.

    Raises LyapunovPruneError for examples that do not fit the model and for a loss that is not finite; NonFiniteError
    if the layer of a decoder can be named.
    """
    examples = as_examples(model, examples)
    if isinstance(examples, ImageBatch):
        return _of_images(model.model, examples, batch_size)
    reading = read(wrap(model), examples)
    losses, correct = of_windows(reading, _loss_and_correct, batch_size, "score").T.numpy().copy()
    require_finite_losses(reading, losses)
    return ItemScores(losses, correct, reading.measured_on())


def _loss_and_correct(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    right = (logits.argmax(-1) == wanted).sum().double().cpu()
    return torch.stack([loss_sum(logits, wanted), right])


def _of_images(model: PreTrainedModel, images: ImageBatch, batch_size: int) -> ItemScores:
    losses, correct = [], []
    batches = zip(model_inputs(model, images, batch_size), images.labels.split(batch_size), strict=True)
    for pixels, labels in track(list(batches), "score"):
        logits = model(pixel_values=pixels).logits.cpu()
        losses.append(cross_entropy(lift(logits), labels, reduction="none"))
        correct.append((logits.argmax(-1) == labels).double())
    found = torch.cat(losses).numpy()
    require_numbers(found, f"losses of images of {images.source}")
    return ItemScores(found, torch.cat(correct).numpy(), images.measured_on(model))


@checked
def paired_error(a: ItemScores, b: ItemScores) -> float:
    """Standard error of `a.value − b.value`, paired by item: `sd(a_i − b_i) / √n` with n − 1 degrees of freedom.

    Raises LyapunovPruneError for scores of different items, and for a single item.
    """
    if a.measured_on.text_hash != b.measured_on.text_hash or len(a.items) < 2:
        raise LyapunovPruneError(
            f"cannot compare {len(a.items)} scores of {a.measured_on.text} ({a.measured_on.split}) with {len(b.items)} "
            f"of {b.measured_on.text} ({b.measured_on.split}); score both models on the same two items or more"
        )
    from scipy import stats  # imported late: pruning files alone scores nothing

    return float(stats.sem(a.items - b.items))
