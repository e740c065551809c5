"""What the experiments on recovery share: a dense model with what can be cut from it, and three slices of its data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import job_folder, load, plain, read_text
from lyapunov_prune.data import load_images
from lyapunov_prune.data.examples import Examples, model_inputs
from lyapunov_prune.data.slices import Slices, slices
from lyapunov_prune.forward.hooks import run_backbone
from lyapunov_prune.healing.trained import require_trainable
from lyapunov_prune.joint import Importance, measure_importance
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models import load_classifier
from lyapunov_prune.models.feedforward import find_feedforward
from lyapunov_prune.models.structure import find_layers
from lyapunov_prune.results.result import decode, encode
from lyapunov_prune.results.store import Store

VIT = "runs/experiments/vit/model"  # that 24_vit trains
IMAGES = 32  # in a step and in a forward; of a text it is one window
CONTEXT = 256


@dataclass(frozen=True, eq=False)
class Subject:
    """`student` holds the dense model, which teaches; `data` are slices to learn from and to select by."""

    student: Unmerged
    data: Slices
    batch: int
    jobs: Path

    @property
    def model(self) -> PreTrainedModel:
        return self.student.model

    @property
    def layers(self) -> int:
        return len(self.student.blocks)

    @property
    def most(self) -> tuple[int, int]:
        """How many attentions and activations can go: a decoder keeps an attention, which counts positions."""
        return self.layers - self.model.can_generate(), self.layers

    def about(self) -> dict[str, Any]:
        """What jobs rest on, whatever is done to the model."""
        origins = [part.measured_on(self.model) for part in (self.data.learn, self.data.select)]
        return {"slices": encode(origins), "reduction": self.student.reduction, "batch": self.batch}

    def importance(self, store: Store) -> Importance:
        """By `taylor` on the slice to learn from, measured once."""
        if "importance" not in store:
            store.add("importance", encode(measure_importance(self.student, self.data.learn, batch=self.batch)))
        return decode(Importance, store["importance"])


def subject(model: str, device: str, dtype: str | None, images: str, text: str | None, tokens: int) -> Subject:
    """A decoder with a text, or else a classifier with images. Training needs float32, unless a wider dtype is given.

    A plain block loses its activation (identity), a gated one has its gate at its mean (mean-gate).
    """
    torch.set_num_threads(1)  # the same sums again after a kill, wherever it goes on
    data: Examples
    if text is not None:
        loaded = load(model, device, dtype or "float32")
        dense, batch, data = loaded.model, 1, read_text(loaded, text, tokens, CONTEXT)
    else:
        classifier = load_classifier(model, device=device, dtype=dtype or "float32")
        dense, batch, data = classifier.model, IMAGES, load_images(images, classifier)
        dense.config._name_or_path = "vit" if model == VIT else plain(model)
    require_trainable(dense, "the model")
    cut = slices(data)
    structure = find_layers(dense)
    reduction = "mean-gate" if find_feedforward(structure, 0).gated else "identity"

    @torch.no_grad()
    def run() -> None:
        for inputs in model_inputs(dense, cut.learn, batch):
            run_backbone(structure, inputs)

    return Subject(Unmerged(dense, reduction, run), cut, batch, job_folder(model))


def numbers(given: str, option: str) -> list[float]:
    """What an option such as `1,2,4` lists. Raises LyapunovPruneError for anything that is not positive numbers."""
    try:
        found = [float(word) for word in given.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise lp.LyapunovPruneError(f"{option} {given!r} is no list of positive numbers; write it as 1,2,4")
    return found
