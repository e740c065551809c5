"""Models that look at images: classifiers, and vision-language models, which read a prompt with a picture.

Such a prompt shows that a vision tower still works. No image processor is needed: the picture is noise of the shape
that the tower takes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel


def looks_at_images(model: PreTrainedModel) -> bool:
    """Whether `model` takes pixels instead of token ids."""
    return model.main_input_name == "pixel_values"


def image_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Channels, height and width of a classifier's input images."""
    size: Any = model.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return model.config.num_channels, height, width


_TEXT = 8  # tokens before and after the picture
_SIDE = 4  # merged patches per side, for a tower that takes pictures of any size


def reads_pictures(model: PreTrainedModel) -> bool:
    return {"pixel_values", "input_ids"} <= inspect.signature(model.forward).parameters.keys()


@torch.no_grad()
def picture_prompt(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """Arguments for a forward of `model`: token ids with placeholders, and one picture.

    None for a model that reads no pictures, or if no known form fits: the forward must run, and another picture must
    give other logits.
    """
    if not reads_pictures(model):
        return None
    taken = inspect.signature(model.forward).parameters
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    token = _number(model.config, "image_token_id", "image_token_index") or vocabulary - 1
    for pixels in _pictures(model):
        pixels = {name: value for name, value in pixels.items() if name in taken}
        for count in sorted(_features(model, pixels)):
            text = torch.arange(2 * _TEXT) % token
            ids = torch.cat([text[:_TEXT], torch.full((count,), token), text[_TEXT:]]).unsqueeze(0).to(model.device)
            kinds = {name: (ids == token).long() for name in ("mm_token_type_ids", "token_type_ids") if name in taken}
            if _matters(model, prompt := {"input_ids": ids, **pixels, **kinds}):
                return prompt
    return None


def picture_logits(model: PreTrainedModel, prompt: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**prompt, use_cache=False).logits


def _pictures(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """One picture in each form that towers take."""
    tower = getattr(model.config, "vision_config", None) or getattr(model.config, "vq_config", None) or model.config
    channels, patch = _number(tower, "num_channels", "in_channels") or 3, _number(tower, "patch_size")
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(model.device, model.dtype)

    def whole(*numbers: int) -> torch.Tensor:
        return torch.tensor([numbers], device=model.device)

    if patch:
        along = _SIDE * (_number(tower, "spatial_merge_size") or 1)
        values = channels * patch**2 * (_number(tower, "temporal_patch_size") or 1)
        patches = noise(along**2, values)
        yield {"pixel_values": patches, "image_grid_thw": whole(1, along, along)}
        places = torch.cartesian_prod(torch.arange(side := 3 * _SIDE), torch.arange(side)).flip(-1)
        places = places.unsqueeze(0).to(model.device)
        for wide in (patch, patch * (_number(tower, "pooling_kernel_size") or 1)):
            yield {"pixel_values": noise(1, side**2, channels * wide**2), "image_position_ids": places}
    for size in filter(None, (_number(tower, "image_size"), patch and patch * _SIDE, 2**5)):
        picture = noise(1, channels, size, size)
        yield {"pixel_values": picture}
        yield {"pixel_values": picture, "image_sizes": whole(size, size)}
        yield {"pixel_values": picture.unsqueeze(0), "image_sizes": whole(size, size)}


def _features(model: PreTrainedModel, pixels: dict[str, torch.Tensor]) -> set[int]:
    """The numbers of placeholder tokens that a picture's features may take.

    0 if the model itself puts them before the text; empty if the tower rejects the picture.
    """
    found: Any = next((f for m in (model, model.base_model) if (f := getattr(m, "get_image_features", None))), None)
    if found is None:
        return {0}
    taken = inspect.signature(found).parameters
    try:
        features = found(**{name: value for name, value in pixels.items() if name in taken})
    except Exception:  # each tower rejects a picture of another form differently
        return set()
    kinds = features.values() if isinstance(features, Mapping) else [features]
    parts = [kind if isinstance(kind, list | tuple) else [kind] for kind in kinds]
    return {
        sum(math.prod(part.shape[:-1]) for part in tensors)
        for tensors in parts
        if tensors and all(isinstance(part, torch.Tensor) for part in tensors)
    }


def _matters(model: PreTrainedModel, prompt: dict[str, torch.Tensor]) -> bool:
    try:
        logits = picture_logits(model, prompt)
        other = picture_logits(model, prompt | {"pixel_values": -prompt["pixel_values"]})
    except Exception:
        return False
    return bool(logits.isfinite().all()) and not torch.equal(logits, other)


def _number(config: Any, *names: str) -> int | None:
    """The first of these settings that exists; for a pair, its first number."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int):
            return value
    return None
