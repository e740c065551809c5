"""The checks of the removal gate that need only files, without a model in memory.

Comparing logits takes every layer once: with `stream` both models are read one layer at a time. Without it a checkpoint
that was pruned on disk has never been run, and its card says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.outline import Outline, read_outline
from lyapunov_prune.checkpoints.reloading import GateCheck, changed_setting, wrong_packed_keys
from lyapunov_prune.checkpoints.streamed import streamed
from lyapunov_prune.checkpoints.tensor_files import read_tensors
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import finite_at, residual_stream, skipped
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.forward.masking import masked_experts
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.pictures import picture_logits, picture_prompt, reads_pictures
from lyapunov_prune.models.streamed import Run
from lyapunov_prune.models.units import selected
from lyapunov_prune.progress import status
from lyapunov_prune.pruning.counting import count_check, leaving
from lyapunov_prune.pruning.edit import Edit
from lyapunov_prune.pruning.gate import CACHED, PICTURED, SKIPPED, Gate, GateReport, attempt, crashed, seen_by
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import ChannelsGone

KEYS, PLACED = "keys and settings", "layers in their places"


def not_run(model: PreTrainedModel, *, stream: bool) -> tuple[str, ...]:
    """The names of the gate's checks that are not made on the files of `model`.

    With `stream` the written files are what runs, so the check of the reloaded logits is covered. Cached decoding is
    left out: every step would read all files.
    """
    if stream:
        return (CACHED,)
    return (SKIPPED, CACHED, *([PICTURED] if reads_pictures(model) else []), "logits after reloading")


def verify_files(
    outline: Outline,
    edit: Edit,
    plan: PruningPlan,
    folder: Path,
    *,
    stream: bool = False,
) -> GateReport:
    """Check the pruned checkpoint in `folder` against the original's `outline` and the `edit`.

    1. Plain transformers finds every tensor it asks for, in its shape, and none besides; every layer has the
       settings it had.
    2. All weights of every layer are those of the layer it was, but for those of experts and channels that left, and
       all outside the layers what they were.
    3. The counts of layers, parameters and bytes fell by exactly what was removed.
    4. With `stream`, the written model gives the logits of the original with the layers skipped and experts and
       channels masked, on random tokens. Both are read one layer at a time. A model that reads images is also compared
       with one in the prompt.

    Raises LyapunovPruneError if files of the original can no longer be read, and NonFiniteError if its states are not
    finite.
    """
    try:
        written = read_outline(folder, plan.model.name)
    except LyapunovPruneError as error:
        reason = str(error).replace(str(folder), "what was written").rpartition(";")[0]
        return GateReport((GateCheck(KEYS, False, float("inf"), 0.0, reason),))
    saved, goes = sum(size for _, size in written.sizes()), leaving(outline.decoder, edit, outline.sizes())
    checks = [
        _keys_check(written, edit.made, folder),
        _places_check(outline, written, edit, goes.shares),
        count_check(goes, written.decoder, saved),
    ]
    return _run(outline, written, plan, checks) if stream else GateReport(tuple(checks))


@torch.no_grad()
def _run(outline: Outline, written: Outline, plan: PruningPlan, checks: list[GateCheck]) -> GateReport:
    """`checks`, followed by the checks of the logits, both models streamed."""
    original = streamed(outline)
    inputs, prompt, with_picture = sample_inputs(original, None), picture_prompt(original.model), None
    try:
        gate = Gate(original, streamed(written), inputs, partial(_skipping, plan=plan), plan.drops_parts)
        expected = gate.expected()
        if prompt is not None:
            with gate.standing_in(original):
                with_picture = picture_logits(original.model, prompt)
    except LyapunovPruneError:  # the original's fault: this says nothing about what was written
        raise
    except Exception as error:
        return GateReport((*checks, crashed(SKIPPED, error)), seen_by(original, None, inputs))
    with status("what was written"):
        detail = "logits of the files written, streamed, against the original's without what left"
        checks.append(attempt(SKIPPED, partial(gate.same, detail, expected)))
    if prompt is not None and with_picture is not None:
        with status("what was written, with a picture"):
            detail = "logits with a picture in the prompt, streamed"
            checks.append(attempt(PICTURED, partial(gate.pictured, prompt, with_picture, detail)))
    return GateReport(tuple(checks), seen_by(original, None, inputs))


@contextmanager
def _skipping(decoder: Decoder, plan: PruningPlan) -> Iterator[None]:
    """Within the block, `decoder` runs without the layers, experts and channels of `plan`.

    A state that is not finite raises NonFiniteError.
    """
    told = "the original, without what left"
    looking = residual_stream(decoder.structure, finite_at(told), one_state=False)
    fewer = masked_experts(decoder, plan.gone.experts_gone)
    with status(told), skipped(decoder.structure, plan.remove), fewer, _narrower(decoder, plan), looking:
        yield


@contextmanager
def _narrower(decoder: Decoder, plan: PruningPlan) -> Iterator[None]:
    """Within the block, the columns of the channels of `plan` are zero in the streamed `decoder`."""
    gone = plan.gone
    if not isinstance(gone, ChannelsGone):
        yield
        return
    assert decoder.stream is not None
    units, leaving = decoder.units, gone.channels

    def visit(layer: int, hidden: torch.Tensor, run: Run) -> None:  # the weights that are read are changed
        if layer in plan.kept:
            for unit, gone in zip(units[layer], leaving[layer], strict=True):
                unit.out.weight(decoder.model)[:, list(gone)] = 0

    with decoder.stream.visiting(visit):
        yield


def _keys_check(written: Outline, pruned: Decoder, folder: Path) -> GateCheck:
    extra = sorted(read_tensors(folder).keys() - written.stored.keys())
    wrong = (
        (f"{extra[0]} is no tensor of the model" if extra else None)
        or changed_setting(pruned.layers, written.decoder.layers)
        or wrong_packed_keys(folder, written.model.config)
    )
    return GateCheck(KEYS, not wrong, float(bool(wrong)), 0.0, wrong or "names, shapes and settings on plain loading")


def _places_check(outline: Outline, written: Outline, edit: Edit, shares: Mapping[str, Fraction]) -> GateCheck:
    was, now = _by_layer(outline), _by_layer(written)
    stays = {name for name, share in shares.items() if not share}
    changed = [name for name in was[None].keys() & stays if now[None].get(name) != was[None][name]]
    if changed:
        return GateCheck(PLACED, False, len(changed), 0.0, f"{min(changed)} is not what it was")
    olds, news = (o.model.state_dict() if edit.parts else {} for o in (outline, written))
    for new, name in edit.tensors.items():
        parts = edit.parts.get(name)
        if parts is None or outline.decoder.structure.layer_of(name) is None:
            continue
        old_tensor, new_tensor = (torch.empty_like(t, device="cpu") for t in (olds[name], news[new]))
        outline.fill(old_tensor, name)
        written.fill(new_tensor, new)
        if not torch.equal(selected(old_tensor, parts), new_tensor):
            return GateCheck(PLACED, False, 1.0, 0.0, f"{new} does not hold the kept part of {name}")
        for by_layer, each in ((was, name), (now, new)):
            layer, inside = _within(each, outline)
            del by_layer[layer][inside]
    wrong = [new for new, old in enumerate(edit.kept) if now[new] != was[old]]
    detail = "all weights of every layer, and outside them, against the original's"
    if wrong:
        detail = f"layer {wrong[0]} does not hold the weights of layer {edit.kept[wrong[0]]}"
    return GateCheck(PLACED, not wrong, len(wrong), 0.0, detail)


def _by_layer(outline: Outline) -> dict[int | None, dict[str, dict[str, str]]]:
    """The digests of each layer's tensors, by name within the layer; tensors outside the layers by full name."""
    by_layer: dict[int | None, dict[str, dict[str, str]]] = {}
    for name, digests in outline.digests.items():
        layer, inside = _within(name, outline)
        by_layer.setdefault(layer, {})[inside] = digests
    return by_layer


def _within(name: str, outline: Outline) -> tuple[int | None, str]:
    """The layer of a tensor and its name in it; None and the full name outside the layers."""
    layer = outline.decoder.structure.layer_of(name)
    return layer, name if layer is None else name.removeprefix(f"{outline.decoder.structure.layers_path}.{layer}.")
