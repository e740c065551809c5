"""The folder of a joint removal: that it computes what learnt, what belongs beside its weights, and its card."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.cards import as_text
from lyapunov_prune.errors import CheckFailed
from lyapunov_prune.forward.logits import SAME_LIMIT, deviation, sample_inputs, uncached_logits
from lyapunov_prune.joint.recovery import Lesson
from lyapunov_prune.joint.result import JointRun
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.classifier_loading import PROCESSOR
from lyapunov_prune.models.classifiers import looks_at_images
from lyapunov_prune.models.loading import checkpoint_folder
from lyapunov_prune.models.structure import find_layers
from lyapunov_prune.models.wrappers import loading_class
from lyapunov_prune.pruning.gate import GateReport
from lyapunov_prune.pruning.provenance import describe

MERGED = 10.0  # times the limit of one model's own kernels: a merge rounds a product once, and sums in another order


def keep_processor(model: PreTrainedModel, folder: Path) -> None:
    """What scales the pixels of a classifier is beside its weights, if it has any, and goes with them."""
    name = model.config._name_or_path
    if name and looks_at_images(model):
        processor = checkpoint_folder(name, offline=True) / PROCESSOR
        if processor.is_file():
            shutil.copy(processor, folder / PROCESSOR)


@torch.no_grad()
def require_merged(pupil: Unmerged, lesson: Lesson, compact: PreTrainedModel) -> None:
    """Raise CheckFailed unless `compact` computes what has learnt; the gate knows only what it was told to be."""
    inputs = sample_inputs(pupil.model, None)[0]
    with pupil.cut(lesson.attention, lesson.activation) as model:
        reference = uncached_logits(model, inputs)
    error, limit = deviation(uncached_logits(compact, inputs), reference), MERGED * SAME_LIMIT[pupil.model.dtype]
    if not error <= limit:
        raise CheckFailed(
            f"the merged model is not the one that learnt: logits deviate by {error:.2g} (limit {limit:.0e}); "
            "report this"
        )


def describe_joint(
    folder: Path, run: JointRun, gate: GateReport, model: PreTrainedModel, compact: PreTrainedModel
) -> None:
    """Write provenance.json and the card of `compact`, which was cut from `model` and learnt as `run` says."""
    describe(
        folder,
        run.plan,
        gate,
        find_layers(model),
        compact.num_parameters(),
        loader=loading_class(compact).__name__,
        format="compact",
        learnt=f"It has learnt\nfrom the dense model since, the last {len(run.losses)} steps as it is.",
        sections={"Decision": "\n".join(f"- {as_text(line)}" for line in run.headline().splitlines())},
    )
