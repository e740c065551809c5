"""What of the removal gate can be checked on files, without a model in memory.

Logits need every layer once: with `stream` both models are read one layer at a time and compared. Else a checkpoint
pruned on disk has not been run, and its card says so.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.outline import Outline, layer_of, read_outline
from lyapunov_prune.checkpoints.reloading import GateCheck, changed_setting, wrong_packed_keys
from lyapunov_prune.checkpoints.streamed import streamed
from lyapunov_prune.checkpoints.tensor_files import read_tensors
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.forward.hooks import residual_stream, skipped
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import SAME_LIMIT, deviation, sample_inputs
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.pictures import picture_logits, picture_prompt, reads_pictures
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.progress import status
from lyapunov_prune.pruning.counting import count_check, shares_leaving
from lyapunov_prune.pruning.gate import CACHED, PICTURED, SKIPPED, GateReport, attempt, crashed, same_check, seen_by
from lyapunov_prune.pruning.plan import PruningPlan

KEYS, PLACED = "keys and settings", "layers in their places"


def not_run(model: PreTrainedModel, *, stream: bool) -> tuple[str, ...]:
    """The checks of the gate that are not made on the files of `model`.

    Streamed, what runs is what was written: its logits are those after reloading. A step of a decoder reads all files.
    """
    if stream:
        return (CACHED,)
    return (SKIPPED, CACHED, *([PICTURED] if reads_pictures(model) else []), "logits after reloading")


def verify_files(
    outline: Outline, pruned: PreTrainedModel, plan: PruningPlan, folder: Path, *, stream: bool = False
) -> GateReport:
    """Check the pruned checkpoint in `folder` against the original's `outline` and the `pruned` meta model.

    1. Plain transformers finds every tensor it asks for, in its shape, and none besides; every layer has the
       settings it had.
    2. All weights of every layer are those of the layer it was, and all outside the layers what they were.
    3. Layers, parameters and bytes fell by exactly what was removed.
    4. With `stream`, the logits of what was written are those of the original with the layers skipped, on random
       tokens, both read one layer at a time; of a model that reads pictures also with one in the prompt.

    Raises LyapunovPruneError for files of the original that can no longer be read, and NonFiniteError for states of it.
    """
    try:
        written = read_outline(folder, plan.model.name)
    except LyapunovPruneError as error:
        reason = str(error).replace(str(folder), "what was written").rpartition(";")[0]
        return GateReport((GateCheck(KEYS, False, float("inf"), 0.0, reason),))
    checks = [
        _keys_check(written, pruned, folder),
        _places_check(outline, written, plan),
        count_check(outline.model, outline.sizes(), written.model, sum(size for _, size in written.sizes()), plan),
    ]
    if not stream:
        return GateReport(tuple(checks))
    original = streamed(outline)
    inputs = sample_inputs(wrap(original), None)
    try:
        prompt = picture_prompt(original)
        reference, with_picture = _reference(original, plan, inputs, prompt)
    except LyapunovPruneError:  # its files, or its states: no verdict on what was written
        raise
    except Exception as error:
        checks.append(crashed(SKIPPED, error))
    else:
        checks.append(attempt(SKIPPED, lambda: _logits_check(streamed(written), inputs, reference)))
        if prompt is not None and with_picture is not None:
            checks.append(attempt(PICTURED, lambda: _picture_check(streamed(written), prompt, with_picture)))
    return GateReport(tuple(checks), seen_by(original, None, inputs))


@torch.no_grad()
def _reference(
    original: PreTrainedModel, plan: PruningPlan, inputs: list[torch.Tensor], prompt: dict[str, torch.Tensor] | None
) -> tuple[KeptLogits, torch.Tensor | None]:
    """The logits of `original`, its layers skipped, on `inputs` and on the `prompt` with a picture."""
    structure = find_structure(original)

    def visit(layer: int, hidden: torch.Tensor) -> None:
        if not hidden.isfinite().all():
            raise NonFiniteError(layer, "the original, its layers skipped")

    skipping, looking = skipped(structure, plan.remove), residual_stream(structure, visit, one_state=False)
    with status("the original, its layers skipped"), skipping, looking:
        return KeptLogits(wrap(original), inputs), None if prompt is None else picture_logits(original, prompt)


@torch.no_grad()
def _logits_check(pruned: PreTrainedModel, inputs: list[torch.Tensor], reference: KeptLogits) -> GateCheck:
    with status("what was written"):
        detail = "logits of the files written, streamed, against the original's with the layers skipped"
        return same_check(pruned, inputs, reference, SAME_LIMIT[pruned.dtype], detail)


@torch.no_grad()
def _picture_check(pruned: PreTrainedModel, prompt: dict[str, torch.Tensor], reference: torch.Tensor) -> GateCheck:
    with status("what was written, with a picture"):
        worst, limit = deviation(picture_logits(pruned, prompt), reference), SAME_LIMIT[pruned.dtype]
        return GateCheck(PICTURED, worst <= limit, worst, limit, "logits with a picture in the prompt, streamed")


def _keys_check(written: Outline, pruned: PreTrainedModel, folder: Path) -> GateCheck:
    extra = sorted(read_tensors(folder).keys() - written.stored.keys())
    wrong = f"{extra[0]} is no tensor of the model" if extra else ""
    wrong = wrong or changed_setting(pruned, written.model) or wrong_packed_keys(folder, written.model.config)
    return GateCheck(KEYS, not wrong, float(bool(wrong)), 0.0, wrong or "names, shapes and settings on plain loading")


def _places_check(outline: Outline, written: Outline, plan: PruningPlan) -> GateCheck:
    was, now = _by_layer(outline), _by_layer(written)
    stays = {name for name, share in shares_leaving(outline.model, plan).items() if not share}
    changed = [name for name in was[None].keys() & stays if now[None].get(name) != was[None][name]]
    if changed:
        return GateCheck(PLACED, False, len(changed), 0.0, f"{min(changed)} is not what it was")
    wrong = [new for new, old in enumerate(plan.kept) if now[new] != was[old]]
    detail = "all weights of every layer, and outside them, against the original's"
    if wrong:
        detail = f"layer {wrong[0]} does not hold the weights of layer {plan.kept[wrong[0]]}"
    return GateCheck(PLACED, not wrong, len(wrong), 0.0, detail)


def _by_layer(outline: Outline) -> dict[int | None, dict[str, dict[str, str]]]:
    """The digests of each layer's tensors, by their names inside the layer; of those outside, by their whole names."""
    by_layer: dict[int | None, dict[str, dict[str, str]]] = {}
    for name, digests in outline.digests.items():
        layer = layer_of(name, outline.structure)
        inside = name if layer is None else name.removeprefix(f"{outline.structure.layers_path}.{layer}.")
        by_layer.setdefault(layer, {})[inside] = digests
    return by_layer
