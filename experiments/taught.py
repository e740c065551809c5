"""What experiments on how models recover share: a dense model with what can be cut from it, and its importance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Model
from experiments.recoveries import subject
from lyapunov_prune.data.examples import Slices
from lyapunov_prune.joint import Importance, measure_importance
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.feedforward import find_feedforward
from lyapunov_prune.models.structure import find_layers
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.store import Store

CONTEXT = 256


@dataclass(frozen=True, eq=False)
class Taught:
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


def taught(model: Model, text: str, tokens: int, reduction: str | None = None) -> Taught:
    """A decoder with a text, or the ViT with its images. Training needs float32, unless a wider dtype is given.

    If no `reduction` is given, a plain block loses its activation (identity), and a gated one has its gate at its mean
    (mean-gate).
    """
    torch.set_num_threads(1)  # the same sums again after a kill, wherever it goes on
    wide = replace(model, dtype=model.dtype or "float32")
    of = subject(wide, text, tokens, CONTEXT)
    gated = find_feedforward(find_layers(of.model), 0).gated
    student = of.student(reduction or ("mean-gate" if gated else "identity"))
    return Taught(student, of.data, of.recipe.batch, of.jobs)


def numbers(given: str, option: str) -> list[float]:
    """What an option such as `1,2,4` lists. Raises LyapunovPruneError for anything that is not positive numbers."""
    try:
        found = [float(word) for word in given.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise lp.LyapunovPruneError(f"{option} {given!r} is no list of positive numbers; write it as 1,2,4")
    return found
