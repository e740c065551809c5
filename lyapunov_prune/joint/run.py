"""A joint removal from end to end: importance, points, map, decision, recovery, compact checkpoint, score."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lyapunov_prune.arguments import Count, Seed
from lyapunov_prune.data.examples import NAMES, Examples
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import run_through
from lyapunov_prune.healing.trained import require_trainable
from lyapunov_prune.joint.decision import within_budget
from lyapunov_prune.joint.finish import finish
from lyapunov_prune.joint.job import JointJob, timed
from lyapunov_prune.joint.recovery import RecoveryRecipe
from lyapunov_prune.joint.result import JointRun
from lyapunov_prune.joint.search import search
from lyapunov_prune.merging.table import DEFAULT
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.decoder import Decoder, runs_model
from lyapunov_prune.models.left_out import require_whole
from lyapunov_prune.models.plain import PlainAny
from lyapunov_prune.results.files import require_empty
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.store import Store

_RECIPE = RecoveryRecipe(rank=8)
_LEAST_SELECTED = 5  # with 4 items a standard error has a relative error of 1/√(2(n − 1)), two fifths


@runs_model
def remove_jointly(
    model: PlainAny,
    tokenizer: PreTrainedTokenizerBase | None,
    slices: tuple[Examples, Examples, Examples],
    output: str | Path,
    *,
    remove: int,
    reduction: str = DEFAULT,
    steps: Count = 12,
    recover_steps: Count = 100,
    recipe: RecoveryRecipe = _RECIPE,
    seeds: Count = 2,
    seed: Seed = 0,
    folder: str | Path,
    batch_size: Count = 1,
) -> JointRun:
    """Remove attentions and activations of `model`, the number of each chosen by a map of the score after recovery.

    `slices` are three disjoint sets of data: to train on, to select by, and the final one, which is scored once at the
    end. Importance gives an order within each type; the points of `chains.chains` are recovered for `steps` steps each
    and scored on the selection slice; a map is fitted to them, and the decision is its best pair of
    `remove` parts. That pair is trained for `recover_steps` more steps from the weights of its point or the
    nearest smaller one; these weights are kept if training does not pay on the selection slice. It is merged, written
    to the folder `output` as a compact checkpoint that has passed its gate, and scored. `recipe` holds what all
    recoveries share.

    Without `reduction` blocks are reduced by the least-squares fit: after recovery it was better than or
    indistinguishable from the others on two models (experiments/5_joint). `folder` keeps the unfinished work:
    an interrupted run continues from there and reaches the same decision; it is deleted when `output` exists.

    Raises LyapunovPruneError for a number that cannot be removed, slices that share data, a final slice
    that a recorded step of `model` has seen, fewer than five items to select by, a model that the compact format does
    not support, the errors of `decide`, `fit_map` and `recover`, and while another run does the same in `folder`;
    CheckFailed when the gate does not hold. In all cases `output` stays empty.
    """
    require_empty(output)
    require_whole(model.model)
    require_trainable(model.model, "the model")
    origins = tuple(data.measured_on(model.model) for data in slices)
    _require_slices(model, slices, origins)
    layers = model.structure.num_layers
    most = (layers - 1 if model.model.can_generate() else layers, layers)
    within_budget(layers, remove, most)  # refused early
    seconds: dict[str, float] = {}
    with timed(seconds, "calibration"):
        student = Unmerged(model, reduction, lambda: run_through(model, slices[0]))
    job = JointJob(
        student,
        slices,
        origins,
        most,
        remove=remove,
        steps=steps,
        recover_steps=recover_steps,
        recipe=recipe,
        seeds=seeds,
        seed=seed,
        folder=Path(folder),
        batch_size=batch_size,
        seconds=seconds,
    )
    with Store(job.folder, "joint removal", job.about, alone=True) as store:
        assert store.place is not None
        job = replace(job, folder=store.place)
        run = finish(job, search(job, store), tokenizer, output)
        store.forget()
    return run


def _require_slices(
    model: Decoder, slices: tuple[Examples, Examples, Examples], origins: tuple[MeasuredOn, ...]
) -> None:
    """Raise LyapunovPruneError if slices share data, the model has seen the final one, or few items select.

    Tokens are compared by runs of 64, images one by one.
    """
    named = zip(NAMES, slices, origins, strict=True)
    for (name, data, _), (other, _, seen) in combinations(named, 2):
        if shared := data.shared_with(seen):
            what = "images" if seen.images else "tokens"
            raise LyapunovPruneError(
                f"the {name} and the {other} slice share {shared} {what} of {seen.text}; give three slices apart"
            )
    _, select, final = slices
    require_unseen(model.model, final)
    if len(select) < _LEAST_SELECTED:
        raise LyapunovPruneError(
            f"{len(select)} items to select by are too few to estimate an error; give {_LEAST_SELECTED} or more (for a "
            "text raise --tokens or lower --context)"
        )
