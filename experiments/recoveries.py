"""What experiments on recovered models share: a model with three slices of its data, and differences paired by item."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from transformers import PreTrainedModel

from experiments.common import Model, read_text
from experiments.compressions import ALIKE
from experiments.images import VIT, load_mnist, load_vit
from lyapunov_prune.data.examples import Slices, slices
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.score import ItemScores, score
from lyapunov_prune.forward.hooks import run_through
from lyapunov_prune.healing.trained import require_trainable
from lyapunov_prune.joint.recovery import RecoveryRecipe
from lyapunov_prune.joint.result import JointRun
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.decoder import wrap_any
from lyapunov_prune.models.structure import identify
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.result import MeasuredOn

FINISHED = Path(__file__).parent / "5_joint" / "joint"
RANK, IMAGES = 8, 32  # as `joint` has them: of the updates; images in a step and in a forward


@dataclass(frozen=True)
class Subject:
    """A model, and data of its own to learn from, to select by and to score at the end, as `joint` cuts it."""

    model: PreTrainedModel
    data: Slices
    jobs: Path

    @property
    def name(self) -> str:
        return identify(self.model).name

    @property
    def recipe(self) -> RecoveryRecipe:
        return RecoveryRecipe(batch=IMAGES if self.final.images else 1, rank=RANK)

    @property
    def final(self) -> MeasuredOn:
        return self.data.final.measured_on(self.model)

    def about(self) -> dict[str, Any]:
        """What every job of it was measured on."""
        return {"slices": encode([part.measured_on(self.model) for part in self.data])}

    def student(self, reduction: str) -> Unmerged:
        """The model with what takes the place of its activations, fitted to the slice to learn from."""
        return Unmerged(wrap_any(self.model), reduction, lambda: run_through(wrap_any(self.model), self.data.learn))

    def scored(self, model: PreTrainedModel) -> dict[str, Any]:
        """The score of every item of the final slice, and whose items they are."""
        found: ItemScores = score(model, self.data.final, batch_size=IMAGES if self.final.images else 1)
        return {"items": found.items.tolist(), "hash": found.measured_on.text_hash}


def subject(model: Model, text: str, tokens: int, context: int) -> Subject:
    """The ViT with its images, or a decoder with the calibration half of a text, cut as `joint` does."""
    if model.name == VIT:
        return Subject(load_vit(model), slices(load_mnist()), model.jobs)
    loaded = model.load()
    require_trainable(loaded.model, model.name)
    return Subject(loaded.model, slices(read_text(loaded, text, tokens, context)), model.jobs)


def finished(of: Subject) -> JointRun:
    """What `joint` came to on this model (5_joint/joint).

    Raises LyapunovPruneError where it ran on another model, and where it has seen items of the final slice.
    """
    run = JointRun.load(FINISHED / f"{of.name}.json")
    if not run.plan.model.same_as(identify(of.model)):
        raise LyapunovPruneError(f"5_joint/joint/{of.name}.json is of another {of.name}; run it anew on this one")
    for on in (*run.importance.measured_on, *run.points.measured_on):
        if shared := of.data.final.shared_with(on):
            raise LyapunovPruneError(
                f"the run of 5_joint/joint has seen {shared} of what is scored at the end ({on.split}); give other data"
            )
    return run


def together(rows: list[list[dict[str, Any]]], final: MeasuredOn) -> np.ndarray:
    """The items of jobs by what was recovered and by seed, (…, seeds, items); of the final slice, or refused."""
    if any(row["hash"] != final.text_hash for seeds in rows for row in seeds):
        raise LyapunovPruneError("some of the jobs were scored on other items than the final slice; pair none with it")
    return np.array([[row["items"] for row in seeds] for seeds in rows])


Difference = tuple[float, float, float]


def difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Mean score of a less that of b, and Student's 95 % interval: means over seeds (seeds, n), paired by item."""
    each = np.atleast_2d(a).mean(0) - np.atleast_2d(b).mean(0)
    half = stats.t.ppf(0.975, len(each) - 1) * stats.sem(each)
    return float(each.mean()), float(each.mean() - half), float(each.mean() + half)


def told(found: Difference) -> str:
    """What the interval of a less b says of a."""
    return "better" if found[1] > 0 else "worse" if found[2] < 0 else ALIKE


def spread(items: np.ndarray) -> str:
    """The scores of several seeds (seeds, n), least to most."""
    scores = sorted(items.mean(-1).tolist())
    return " to ".join(dict.fromkeys([four(scores[0]), four(scores[-1])]))


def four(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")


def gained(found: Difference) -> str:
    """`+0.012 (−0.001 to +0.025)`."""
    middle, low, high = (f"{value:+.3g}".replace("-", "−") for value in found)
    return f"{middle} ({low} to {high})"


def unit(on: MeasuredOn) -> str:
    return "of top-1 accuracy" if on.images else "nats a token"
