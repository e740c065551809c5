"""Rounded matrices as packed integers in the format of compressed-tensors, which transformers and vLLM load.

The grids are the symmetric ones of `grids.stepped`; the library only packs their integers. Zero points would not load:
for asymmetric weights transformers 5.23 expects another shape than compressed-tensors 0.20 writes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.bit_widths import DENSE
from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.arguments import checked
from lyapunov_prune.checkpoints.beside import save_files
from lyapunov_prune.checkpoints.cards import write_card
from lyapunov_prune.checkpoints.reloading import RELOADED, reload_check
from lyapunov_prune.compression.compress import Compressed
from lyapunov_prune.compression.grids import Grid
from lyapunov_prune.compression.method import Rounder
from lyapunov_prune.compression.report import REPORT, CompressionReport, PackedSize
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError, first_of, reported, require_extra
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.linalg import lift, row_blocks
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.from_folder import LOCAL, quiet
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.quantised import PACK, PACKER, unlogged
from lyapunov_prune.models.size import model_size
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.models.weight_files import SINGLE
from lyapunov_prune.models.wrappers import loading_class
from lyapunov_prune.pruning.gate import attempt
from lyapunov_prune.results.files import require_empty, whole_folder
from lyapunov_prune.results.history import HISTORY, history_of

FORMAT = "packed"
_LIBRARY = "compressed-tensors"
BITS = (4, 8)
_SHAPE = 2 * 8  # bytes of two integers, the rows and columns
LOADING = {"Packed": f"Needs the library of the format: `pip install {_LIBRARY}`. vLLM brings it."}  # of a model card
_PARTS = ("weight_packed", "weight_scale", "weight_shape")


def require_packed_options(method: str, bits: float | None, symmetric: bool, allocation: str | Allocation) -> None:
    """Raise LyapunovPruneError for options that the format cannot hold, and if the library is missing."""
    on_grid = [name for name, known in METHODS.items() if getattr(known, "on_grid", False)]
    if isinstance(allocation, Allocation):
        held = allocation.unit == "bits" and {*allocation.amount} <= {*range(2, 9), DENSE}
    else:
        held = bits in BITS if allocation == "uniform" else SCHEDULES[allocation].unit == "bits"
    name = allocation.schedule if isinstance(allocation, Allocation) else allocation
    given = "no bits" if bits is None else f"{bits:g} bits"
    wrong = {
        f"weights that were rounded on a grid, not those of {method}; give --method {' or '.join(on_grid)}": (
            method not in on_grid
        ),
        f"4 or 8 bits, or by layer whole bits of 2 to 8 (16 for unpacked), not {given} by {name}; give --bits 4 or "
        "--bits 8, or an allocation of bits": not held,
        "symmetric grids, since transformers does not load zero points packed; give symmetric=True": not symmetric,
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"--format {FORMAT} packs {why}")
    require_extra(*PACKER)


def require_packable(model: PreTrainedModel, group_size: int | None) -> tuple[Projection, ...]:
    """The matrices of the layers; each must be an `nn.Linear` of its own whose rows divide into whole groups.

    Raises LyapunovPruneError for other matrices, and for a model that transformers cannot load packed.
    """
    projections = find_projections(wrap(model))
    for p in projections:
        module = model.get_submodule(p.module)
        if is_compact(model) or p.expert is not None or not isinstance(module, nn.Linear):
            kept = "holds all experts in one tensor" if p.expert is not None else f"is a {type(module).__name__}"
            raise LyapunovPruneError(
                f"{p.module} of {type(model).__name__} {kept}, and {_LIBRARY} packs only Linear modules of plain "
                "models; compress it without --format"
            )
    _require_loads_packed(model, group_size)
    return projections


def _require_loads_packed(model: PreTrainedModel, group_size: int | None) -> None:
    """Raise LyapunovPruneError unless transformers can build the model packed; some classes read missing weights.

    It is tried on the `meta` device, with a file that holds no tensor.
    """
    with tempfile.TemporaryDirectory(prefix="lyapunov-prune-packed-") as place, quiet():
        folder = Path(place)
        model.config.save_pretrained(folder)
        bits = {p.module: BITS[0] for p in find_projections(wrap(model))}
        Packing("rtn", bits, group_size).write_config(folder, model)
        save_file({}, folder / SINGLE, {"format": "pt"})
        loader: Any = loading_class(model)
        what = f"transformers cannot load a packed {type(model).__name__}"
        whole = reported(what, "leave out --format", Exception)  # whatever the model's own code raises
        with whole, unlogged(AutoConfig.from_pretrained(folder, **LOCAL)):
            loader.from_pretrained(folder, device_map="meta", **LOCAL)


@checked
@in_eval_mode
def write_packed(
    model: PreTrainedModel, done: Compressed, tokenizer: PreTrainedTokenizerBase, target: str | Path, title: str
) -> CompressionReport:
    """Write `done`, which `compress` made of `model` on symmetric grids, with its matrices packed; returns its report.

    For every matrix the files hold integers q and scales s whose products `s q` equal the weights of `done` to the last
    bit. The rest of the folder is what `write_model` writes; the report gains the size.

    Raises CheckFailed if plain transformers would unpack another weight or compute other logits. Raises
    LyapunovPruneError if the format cannot hold the result, the target is not empty or writing fails. In both cases
    nothing is left there.
    """
    report, small = done.report, done.model
    require_packed_options(report.method, None, report.symmetric, report.allocation)
    projections = require_packable(model, report.group_size)
    require_empty(target)
    packing = Packing(report.method, _widths(projections, report.allocation), report.group_size)
    for p in projections:
        packing.keep(p, p.weight(model), p.weight(small))
    state = packing.stored(small.state_dict())
    with whole_folder(target) as folder:
        save_files(small, tokenizer, folder, state)
        packing.write_config(folder, small)
        inputs = sample_inputs(wrap(small), None)
        changed = partial(_changed, small, projections=projections)
        check = attempt(RELOADED, lambda: in_eval_mode(reload_check)(wrap(small), folder, inputs, changed))
        check.require_passed("the model does not unpack as it was rounded", "write it plain")
        report = replace(report, packed=packed_in(folder, small))
        history_of(small).save(folder / HISTORY)
        report.save(folder / REPORT)
        write_card(folder, title, report.about(), small, LOADING)
    return report


def _widths(projections: Sequence[Projection], allocation: Allocation) -> dict[str, int]:
    """The bits of every packed module; raises LyapunovPruneError if the matrices of one module differ in bits."""
    widths: dict[str, int] = {}
    for p in projections:
        bits = int(allocation.of(p.name))
        if widths.setdefault(p.module, bits) != bits:
            raise LyapunovPruneError(f"{p.module} holds matrices of {widths[p.module]} and {bits} bits; give it one")
    return {module: bits for module, bits in widths.items() if bits != DENSE}


class Packing:
    """The integers, scales and shapes that a file stores for rounded matrices.

    `bits` holds the bits of every packed module. The grid of a matrix is in memory from `keep` until `stored`.
    """

    def __init__(self, method: str, bits: Mapping[str, int], group_size: int | None) -> None:
        made = METHODS.make(method, symmetric=True, **({} if group_size is None else {"group_size": group_size}))
        assert isinstance(made, Rounder)
        self._method, self._bits, self._group_size = made, bits, group_size
        self._grids: dict[str, list[Grid]] = {}

    def keep(self, p: Projection, W: torch.Tensor, after: torch.Tensor) -> None:
        """Keep `after`, which the method made of the matrix W of `p`, as integers on the grids of W.

        The matrices of a fused module must come in the order of its rows. Raises CheckFailed unless the integers give
        `after` to the last bit. A matrix that is not packed is ignored.
        """
        if p.module not in self._bits:
            return
        parts = []
        for rows, left in zip(row_blocks(W), row_blocks(after), strict=True):
            steps = self._method.steps(rows, self._bits[p.module])
            parts.append(Grid(steps.integers(lift(left)).to(torch.int8), steps.scale.to(W.dtype)))
        grid = Grid(*(torch.cat(part) for part in zip(*parts, strict=True)))
        if not torch.equal(grid.values(), after):
            raise CheckFailed(
                f"nothing written: {p.name} is not what {self._method.name} gives for the model; compress it again"
            )
        self._grids.setdefault(p.module, []).append(grid)

    def stored(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors`, with every rounded matrix replaced by its stored parts, whose memory is then released."""
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        state = dict(tensors)
        for name in [name for name in self._grids if f"{name}.weight" in state]:
            W = state.pop(f"{name}.weight")
            integers, scale = (torch.cat(rows) for rows in zip(*self._grids.pop(name), strict=True))
            packed = pack_to_int32(integers, self._bits[name]), scale, torch.tensor(W.shape)
            state |= {f"{name}.{part}": tensor for part, tensor in zip(_PARTS, packed, strict=True)}
        return state

    def size(self, model: PreTrainedModel) -> int:
        """The bytes of all tensors of `model`, packed."""
        size = model_size(model).bytes
        for name, bits in self._bits.items():
            module: Any = model.get_submodule(name)
            m, n, width = module.out_features, module.in_features, module.weight.itemsize
            scales = m * (n // self._group_size if self._group_size else 1)
            size += 4 * m * math.ceil(n * bits / 32) + scales * width + _SHAPE - m * n * width
        return size

    def write_config(self, folder: Path, model: PreTrainedModel) -> None:
        """Add the quantisation settings, which say what of `model` is packed and how, to config.json in `folder`."""
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

        dense = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in self._bits]
        strategy: Any = "group" if self._group_size else "channel"
        by_width: dict[int, list[str]] = {}
        for module, bits in self._bits.items():
            by_width.setdefault(bits, []).append(module)
        groups = {}
        for number, (bits, modules) in enumerate(sorted(by_width.items())):
            weights = QuantizationArgs(num_bits=bits, symmetric=True, strategy=strategy, group_size=self._group_size)
            targets = modules if len(by_width) > 1 else ["Linear"]
            groups[f"group_{number}"] = QuantizationScheme(targets=targets, weights=weights, format=PACK)
        config = QuantizationConfig(
            config_groups=groups,
            ignore=dense,
            format=PACK,
            quantization_status="compressed",
        )
        ModelCompressor(quantization_config=config).update_config(str(folder))


def packed_in(folder: Path, model: PreTrainedModel) -> PackedSize:
    """The sizes of the weights in `folder` and of `model`, which it holds packed."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return PackedSize(PACK, size, model_size(model).bytes, model.num_parameters())


def _changed(small: PreTrainedModel, loaded: PreTrainedModel, projections: tuple[Projection, ...]) -> str | None:
    """The name of the first matrix that unpacking does not restore to the last bit; None if there is none."""
    for p in projections:
        W: Any = small.get_submodule(p.module).weight
        after = getattr(loaded.get_submodule(p.module), "weight", None)
        if not (isinstance(after, torch.Tensor) and after.dtype == W.dtype and torch.equal(after, W)):
            return f"{p.module} is unpacked to other weights"
    return None
