"""Rounded matrices as packed integers in the format of compressed-tensors, which transformers and vLLM load.

The grids are those of `rtn.symmetric_grid`; the library packs their integers and decides nothing. Its zero points do
not load: for asymmetric weights transformers 5.23 expects another shape than compressed-tensors 0.20 writes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.arguments import checked
from lyapunov_prune.checkpoints.cards import write_card
from lyapunov_prune.checkpoints.reloading import reload_check
from lyapunov_prune.checkpoints.shards import size_of
from lyapunov_prune.compression.compress import Compressed
from lyapunov_prune.compression.report import REPORT, CompressionReport, Packed
from lyapunov_prune.compression.rtn import Grid, symmetric_grid
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.loading import quiet
from lyapunov_prune.models.packed import PACK, require_compressed_tensors
from lyapunov_prune.models.projections import Projection, find_projections
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.models.wrappers import loading_class
from lyapunov_prune.results.files import require_empty, whole_folder
from lyapunov_prune.results.history import HISTORY, history_of

FORMAT = "compressed-tensors"
BITS = (4, 8)
_PARTS = ("weight_packed", "weight_scale", "weight_shape")


def require_packed_options(
    method: str,
    bits: float | None,
    symmetric: bool,
    allocation: str | Allocation,
    pattern: tuple[int, int] | None = None,
) -> None:
    """Raise LyapunovPruneError for what the format cannot hold, and without the library."""
    if pattern is not None:
        raise LyapunovPruneError(
            f"{FORMAT} dropped its formats for patterns of zeros, and transformers loads none; leave out --format"
        )
    if method != "rtn":
        raise LyapunovPruneError(f"--format {FORMAT} packs what rtn rounds, not {method}; give --method rtn")
    if bits not in BITS:
        given = "no bits" if bits is None else f"{bits:g} bits"
        raise LyapunovPruneError(f"--format {FORMAT} packs 4 or 8 bits, not {given}; give --bits 4 or --bits 8")
    if allocation != "uniform":
        raise LyapunovPruneError(f"--format {FORMAT} packs all matrices alike; leave out --allocation")
    if not symmetric:
        raise LyapunovPruneError(
            f"the zero points of asymmetric grids do not load packed with transformers; give --symmetric with {FORMAT}"
        )
    require_compressed_tensors()


def require_packable(model: PreTrainedModel, group_size: int | None) -> tuple[Projection, ...]:
    """The matrices of the layers, each in an `nn.Linear` of its own and of whole groups; else LyapunovPruneError."""
    if is_compact(model):
        raise LyapunovPruneError(f"a compact model is not packed ({FORMAT}); compress it without --format")
    projections = find_projections(model)
    owners: dict[int, str] = {}
    for p in projections:
        module = model.get_submodule(p.module)
        if p.expert is not None or not isinstance(module, nn.Linear):
            kept = "holds all experts in one tensor" if p.expert is not None else f"is a {type(module).__name__}"
            raise LyapunovPruneError(
                f"{p.module} {kept}, and {FORMAT} packs Linear modules alone; compress it without --format"
            )
        if owners.setdefault(id(module.weight), p.module) != p.module:
            raise LyapunovPruneError(
                f"{owners[id(module.weight)]} and {p.module} are one matrix; shared layers are not compressed"
            )
        n = module.in_features
        if group_size is not None and (group_size < 1 or n % group_size):
            raise LyapunovPruneError(
                f"groups of {group_size} do not fit the {n} inputs of {p.module}; give a divisor of all, or none"
            )
    return projections


@checked
@in_eval_mode
@torch.no_grad()
def write_packed(
    model: PreTrainedModel, done: Compressed, tokenizer: PreTrainedTokenizerBase, target: str | Path, title: str
) -> CompressionReport:
    """Write `done`, which `compress` made of `model` by symmetric `rtn`, with its matrices packed; returns its report.

    Stored are the integers and scales of the grid of every matrix W of `model`, whose values `s q` are the weights of
    `done` to the last bit. The folder is what `write_model` writes beside them; the report says the size as well.

    Raises CheckFailed when plain transformers would unpack another weight or compute other logits, and
    LyapunovPruneError for what the format cannot hold, when the target is not empty or the disk refuses; either way
    nothing is left there.
    """
    report, small = done.report, done.model
    bits = report.allocation.budget
    require_packed_options(report.method, bits, report.symmetric, report.allocation.schedule)
    projections = require_packable(model, report.group_size)
    require_empty(target)
    state = _packed_state(model, small, projections, int(bits), report.group_size)
    with whole_folder(target) as folder:
        with quiet():
            small.save_pretrained(folder, state_dict=state)
            tokenizer.save_pretrained(folder)
            _write_config(folder, small, projections, int(bits), report.group_size)
        inputs = sample_inputs(small, None)
        check = in_eval_mode(reload_check)(small, folder, inputs, lambda loaded: _changed(small, loaded, projections))
        if not check.passed:
            raise CheckFailed(f"nothing written: the model does not unpack as it was rounded, {check.detail}")
        report = replace(report, packed=Packed(PACK, _size(folder), size_of(small)))
        history_of(small).save(folder / HISTORY)
        report.save(folder / REPORT)
        loading = f"Needs the library of the format: `pip install {FORMAT}`. vLLM brings it."
        write_card(folder, title, report.about(), loading_class(small).__name__, {"Packed": loading})
    return report


def _packed_state(
    model: PreTrainedModel,
    small: PreTrainedModel,
    projections: tuple[Projection, ...],
    bits: int,
    group_size: int | None,
) -> dict[str, torch.Tensor]:
    """The tensors of `small`, with integers, scales and shape in the place of every matrix."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    parts: dict[str, list[Grid]] = {}
    for p in projections:  # in the order of rows, where a module holds several
        parts.setdefault(p.module, []).append(symmetric_grid(p.weight(model), bits, group_size))
    state = dict(small.state_dict())
    for name, grids in parts.items():
        grid = Grid(*(torch.cat(rows) for rows in zip(*grids, strict=True)))
        W = state.pop(f"{name}.weight")
        if not torch.equal(grid.values(), W):
            raise CheckFailed(f"nothing written: {name} is not what rtn makes of the model; compress it anew")
        packed = pack_to_int32(grid.integers, bits), grid.scale, torch.tensor(W.shape)
        state |= {f"{name}.{part}": tensor for part, tensor in zip(_PARTS, packed, strict=True)}
    return state


def _write_config(
    folder: Path, small: PreTrainedModel, projections: tuple[Projection, ...], bits: int, group_size: int | None
) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    packed = {p.module for p in projections}
    dense = [n for n, m in small.named_modules() if isinstance(m, nn.Linear) and n not in packed]
    strategy: Any = "group" if group_size else "channel"
    weights = QuantizationArgs(num_bits=bits, symmetric=True, strategy=strategy, group_size=group_size)
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights, format=PACK)},
        ignore=dense,
        format=PACK,
        quantization_status="compressed",
    )
    ModelCompressor(quantization_config=config).update_config(str(folder))


def _changed(small: PreTrainedModel, loaded: PreTrainedModel, projections: tuple[Projection, ...]) -> str:
    """The first matrix that is not, once unpacked, to the last bit what it was; empty if there is none."""
    for p in projections:
        W: Any = small.get_submodule(p.module).weight
        after = getattr(loaded.get_submodule(p.module), "weight", None)
        if not (isinstance(after, torch.Tensor) and after.dtype == W.dtype and torch.equal(after, W)):
            return f"{p.module} is unpacked to other weights"
    return ""


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
