"""Examples of either kind: windows of tokens, or images."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lyapunov_prune.data.batch import TokenBatch, Tokens, checked_batch
from lyapunov_prune.data.images import ImageBatch, checked_images
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.classifiers import looks_at_images
from lyapunov_prune.models.decoder import Decoder

# Both have `len`, `item(i)` (one model input without the batch dimension), `take(indices)`, `text_hash`, `shared_with`
# and `measured_on`.
Examples = TokenBatch | ImageBatch


def as_examples(decoder: Decoder, examples: Examples | Tokens) -> Examples:
    """Checked examples for a model: tokens or their ids for a decoder, images for an image classifier.

    Raises LyapunovPruneError for examples of the other kind, and as `checked_batch` and `checked_images` do.
    """
    model = decoder.model
    if isinstance(examples, ImageBatch) != looks_at_images(model):
        wanted, given = "images" if looks_at_images(model) else "text", "tokens"
        if isinstance(examples, ImageBatch):
            given = f"images ({examples.source})"
        raise LyapunovPruneError(f"{type(model).__name__} reads {wanted} and was given {given}; give {wanted}")
    if isinstance(examples, ImageBatch):
        return checked_images(model, examples)
    return checked_batch(decoder.structure, examples)


def model_inputs(model: PreTrainedModel, examples: Examples, batch_size: int) -> list[torch.Tensor]:
    """Model inputs in batches of `batch_size`, on its device: token ids, or pixels in its dtype."""
    if isinstance(examples, ImageBatch):
        parts = list(examples.pixels.to(model.dtype).split(batch_size))
    else:
        parts = examples.windows(batch_size)
    return [part.to(model.device) for part in parts]
