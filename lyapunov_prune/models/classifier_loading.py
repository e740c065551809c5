"""Load an image classifier from its folder, with the mean and deviation that normalise its pixels."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageClassification, PreTrainedModel

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.device import resolve_device
from lyapunov_prune.models.folder import loading_errors, require_loadable
from lyapunov_prune.models.from_folder import LOCAL, load_weights, quiet, tell_left_out
from lyapunov_prune.models.loading import checkpoint_folder, known_dtype
from lyapunov_prune.models.structure import Structure, find_layers
from lyapunov_prune.results.history import keep_history, read_history

PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True)
class Normalisation:
    """`(p − mean) / deviation` for pixels p in 0 … 1; one number for all channels or one for each."""

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalise images × channels × height × width; returns float32."""
        mean, deviation = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.deviation))
        return (pixels.float() - mean) / deviation


@dataclass(frozen=True)
class LoadedClassifier:
    model: PreTrainedModel
    structure: Structure
    normalisation: Normalisation


@checked
def load_classifier(
    name: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    offline: bool = False,
) -> LoadedClassifier:
    """Load a ViT or DeiT image classifier, plain or compact, in eval mode.

    `name` is a hub id or a local folder; `dtype` and `device` are as for `load`. Mean and deviation come from the
    folder's image processor; without one, or if it does not normalise, pixels stay in 0 … 1. Only safetensors weights
    are read, and no code from the checkpoint is run.

    Raises LyapunovPruneError, with the remedy, for anything that cannot be loaded whole, and for decoders.
    """
    folder = checkpoint_folder(str(name), offline=offline)
    with quiet():
        require_loadable(folder, images=True)
    options: dict[str, Any] = {"dtype": known_dtype(dtype) or "auto", "device_map": resolve_device(str(device))}
    model = load_weights(
        AutoModelForImageClassification, folder, folder, LOCAL | options | {"use_safetensors": True}, "a ViT or DeiT"
    )
    structure = find_layers(model)
    tell_left_out(model, structure, folder)
    keep_history(model, read_history(folder))
    model.config._name_or_path = str(name)
    return LoadedClassifier(model.eval(), structure, _normalisation(folder, model.config.num_channels))


def _normalisation(folder: Path, channels: int) -> Normalisation:
    path = folder / PROCESSOR
    if not path.is_file():
        return Normalisation()
    with loading_errors(path):
        settings = json.loads(path.read_text(encoding="utf-8"))
        # The value of a pixel of 255 before the mean is subtracted.
        white = 255 * float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else 255.0
        mean, deviation = [0.0], [1.0]
        if settings.get("do_normalize", True):
            mean, deviation = (list(map(float, settings[key])) for key in ("image_mean", "image_std"))
    numbers = [*mean, *deviation, white]
    lengths = {len(mean), len(deviation)}
    if not lengths <= {1, channels} or not all(map(math.isfinite, numbers)) or min(*deviation, white) <= 0:
        raise LyapunovPruneError(
            f"{path} scales by mean {mean} and deviation {deviation}, and the model has {channels} channels; give "
            "finite numbers, a deviation above 0, one for all channels or one for each"
        )
    return Normalisation(tuple(m / white for m in mean), tuple(d / white for d in deviation))
