"""Image classifiers: which models they are, and what images they look at."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def looks_at_images(model: PreTrainedModel) -> bool:
    """Whether `model` is given pixels, not token ids."""
    return model.main_input_name == "pixel_values"


def image_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Channels, height and width of the images that a classifier looks at."""
    size: Any = model.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return model.config.num_channels, height, width
