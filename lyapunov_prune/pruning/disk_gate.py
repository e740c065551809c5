"""What of the removal gate can be checked on files, without a model in memory.

Logits need one: a checkpoint pruned on disk has not been run, and its card says so.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.outline import Outline, layer_of, read_outline
from lyapunov_prune.checkpoints.reloading import GateCheck, changed_setting
from lyapunov_prune.checkpoints.tensor_files import read_tensors
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.families import FAMILIES, Family
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.gate import CACHED, COUNTED, SKIPPED, GateReport
from lyapunov_prune.pruning.plan import PruningPlan

KEYS, PLACED = "keys and settings", "layers in their places"
NOT_RUN = (SKIPPED, CACHED, "logits after reloading")


def verify_files(outline: Outline, pruned: PreTrainedModel, plan: PruningPlan, folder: Path) -> GateReport:
    """Check the pruned checkpoint in `folder` against the original's `outline` and the `pruned` meta model.

    1. Plain transformers finds every tensor it asks for, in its shape, and none besides; every layer has the
       settings it had.
    2. All weights of every layer are those of the layer it was.
    3. Layers, parameters and bytes fell by exactly what was removed.
    """
    try:
        written = read_outline(folder, plan.model.name)
    except LyapunovPruneError as error:
        reason = str(error).replace(str(folder), "what was written").rpartition(";")[0]
        return GateReport((GateCheck(KEYS, False, float("inf"), 0.0, reason),))
    return GateReport(
        (
            _keys_check(written, pruned, folder),
            _places_check(outline, written, plan),
            _count_check(outline, written, plan),
        )
    )


def _keys_check(written: Outline, pruned: PreTrainedModel, folder: Path) -> GateCheck:
    extra = sorted(read_tensors(folder).keys() - written.stored.keys())
    wrong = f"{extra[0]} is no tensor of the model" if extra else ""
    wrong = wrong or changed_setting(find_structure(pruned), written.structure)
    return GateCheck(KEYS, not wrong, float(bool(wrong)), 0.0, wrong or "names, shapes and settings on plain loading")


def _places_check(outline: Outline, written: Outline, plan: PruningPlan) -> GateCheck:
    was, now = _by_layer(outline), _by_layer(written)
    wrong = [new for new, old in enumerate(plan.kept) if now[new] != was[old]]
    detail = "all weights of every layer against the original's"
    if wrong:
        detail = f"layer {wrong[0]} does not hold the weights of layer {plan.kept[wrong[0]]}"
    return GateCheck(PLACED, not wrong, len(wrong), 0.0, detail)


def _by_layer(outline: Outline) -> dict[int | None, dict[str, dict[str, str]]]:
    """The digests of each layer's tensors, by their names inside the layer."""
    found: dict[int | None, dict[str, dict[str, str]]] = {}
    for name, digests in outline.digests.items():
        inside = name.removeprefix(f"{outline.structure.layers_path}.").partition(".")[2]
        found.setdefault(layer_of(name, outline.structure), {})[inside] = digests
    return found


def _count_check(outline: Outline, written: Outline, plan: PruningPlan) -> GateCheck:
    parameters, size = _leaving(outline, plan)
    total, bytes_before = outline.identity.parameters, _bytes(outline)
    config = written.structure.config
    wanted = {
        "layers": (written.structure.num_layers, len(plan.kept)),
        "config's layer count": (getattr(config, written.structure.count), len(plan.kept)),
        "parameters": (written.identity.parameters, total - parameters),
        "bytes saved": (_bytes(written), bytes_before - size),
    }
    for what, (found, expected) in wanted.items():
        if found != expected:
            return GateCheck(COUNTED, False, found, expected, f"{what}: {found:,}, not {expected:,}")
    return GateCheck(COUNTED, True, parameters / total, parameters / total, "share of parameters and bytes that left")


def _leaving(outline: Outline, plan: PruningPlan) -> tuple[int, int]:
    """The parameters and bytes of the removed layers, by the headers of the original, and their share of tables."""
    structure, model = outline.structure, outline.model
    share = len(plan.remove) / structure.num_layers
    tables = dict(FAMILIES.get(structure.model_type, Family()).tables)
    parameters: dict[int, int] = {}  # by identity: what layers share counts once
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if layer_of(name, structure) in plan.remove:
            parameters.setdefault(id(parameter), parameter.numel())
        elif name.split(".")[-2] in tables:
            parameters[id(parameter)] = round(parameter.numel() * share)
        else:
            parameters[id(parameter)] = 0
    size = 0
    for key, target in outline.targets.items():
        if layer_of(target.name, structure) in plan.remove:
            size += outline.stored[key].size
        elif target.name.split(".")[-2] in tables:
            size += round(outline.stored[key].size * share)
    return sum(parameters.values()), size


def _bytes(outline: Outline) -> int:
    return sum(tensor.size for tensor in outline.stored.values())
