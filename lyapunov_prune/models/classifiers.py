"""Image classifiers: how to recognise them, and the shape of their images."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def looks_at_images(model: PreTrainedModel) -> bool:
    """Whether `model` takes pixels instead of token ids."""
    return model.main_input_name == "pixel_values"


def image_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Channels, height and width of a classifier's input images."""
    size: Any = model.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return model.config.num_channels, height, width
