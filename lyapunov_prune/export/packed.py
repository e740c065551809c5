"""Rounded matrices as packed integers in the format of compressed-tensors, which transformers and vLLM load.

The grids are the symmetric ones of `grids.stepped`; the library only packs their integers. Zero points would not load:
for asymmetric weights transformers 5.23 expects another shape than compressed-tensors 0.20 writes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.allocation.allocation import DENSE, Allocation
from lyapunov_prune.arguments import checked
from lyapunov_prune.checkpoints.beside import save_files
from lyapunov_prune.checkpoints.cards import write_card
from lyapunov_prune.checkpoints.reloading import RELOADED, reload_check
from lyapunov_prune.compression.compress import Compressed
from lyapunov_prune.compression.grids import Grid, gridded, stepped
from lyapunov_prune.compression.report import REPORT, CompressionReport, PackedSize
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError, first_of, reported, require_extra
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.from_folder import LOCAL, quiet
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.readers.compressed_tensors import PACK, PACKER, unlogged
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
        held = bits in BITS and allocation == "uniform"
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
        schemes = {p.module: Scheme(BITS[0], group_size) for p in find_projections(wrap(model))}
        Packing(schemes).write_config(folder, model)
        save_file({}, folder / SINGLE, {"format": "pt"})
        loader: Any = loading_class(model)
        what = f"transformers cannot load a packed {type(model).__name__}"
        whole = reported(what, "leave out --format", Exception)  # whatever the model's own code raises
        with whole, unlogged():
            loader.from_pretrained(folder, device_map="meta", **LOCAL)


@dataclass(frozen=True)
class Scheme:
    """Integers of so many `bits`, with a scale for every row or every `group_size` inputs; `DENSE`: not packed."""

    bits: int
    group_size: int | None = None

    @property
    def name(self) -> str:
        if self.bits == DENSE:
            return "16 bits"
        return f"int{self.bits}" + (f" in groups of {self.group_size}" if self.group_size else "")

    def size(self, shape: Sequence[int], scale: int) -> int:
        """The bytes of a matrix in the files, whose scales take `scale` bytes each."""
        rows, columns = shape
        words = 4 * rows * math.ceil(columns * self.bits / 32)
        return words + scale * rows * (columns // self.group_size if self.group_size else 1) + _SHAPE


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
    packing = Packing(_schemes(projections, report.allocation, report.group_size))
    for p in projections:
        packing.keep(p, p.weight(model), p.weight(small))
    with packed_folder(small, tokenizer, target, packing) as folder:
        report = replace(report, packed=packed_in(folder, small))
        history_of(small).save(folder / HISTORY)
        report.save(folder / REPORT)
        write_card(folder, title, report.about(), small, LOADING)
    return report


@contextmanager
def packed_folder(
    small: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, target: str | Path, packing: Packing
) -> Iterator[Path]:
    """The folder `target`, with `small` in it, whose matrices `packing` holds; what else it holds is written inside.

    It appears whole or not at all (`whole_folder`), and after plain transformers loaded it and computed the logits of
    `small`. Raises CheckFailed if it does not, or unpacks another weight.
    """
    state = packing.stored(small.state_dict())
    with whole_folder(target) as folder:
        save_files(small, tokenizer, folder, state)
        packing.write_config(folder, small)
        written, inputs = wrap(small), sample_inputs(wrap(small), None)
        check = attempt(RELOADED, lambda: in_eval_mode(reload_check)(written, folder, inputs, partial(_changed, small)))
        check.require_passed("the model does not unpack as it was rounded", "write it plain")
        yield folder


def _schemes(projections: Sequence[Projection], allocation: Allocation, group_size: int | None) -> dict[str, Scheme]:
    """The scheme of every packed module; raises LyapunovPruneError if the matrices of one module differ in bits."""
    widths: dict[str, int] = {}
    for p in projections:
        bits = int(allocation.of(p.name))
        if widths.setdefault(p.module, bits) != bits:
            raise LyapunovPruneError(f"{p.module} holds matrices of {widths[p.module]} and {bits} bits; give it one")
    return {module: Scheme(bits, group_size) for module, bits in widths.items() if bits != DENSE}


class Packing:
    """The integers, scales and shapes that a file stores for rounded matrices.

    `schemes` holds the scheme of every packed module. The grid of a matrix is in memory from `keep` or `put` until
    `stored`.
    """

    def __init__(self, schemes: Mapping[str, Scheme]) -> None:
        self._schemes = schemes
        self._grids: dict[str, list[Grid]] = {}

    def keep(self, p: Projection, W: torch.Tensor, after: torch.Tensor) -> None:
        """Keep `after`, to which the matrix W of `p` was rounded, as integers on the grids of W.

        The matrices of a fused module must come in the order of its rows. Raises CheckFailed unless the integers give
        `after` to the last bit. A matrix that is not packed is ignored.
        """
        if p.module not in self._schemes:
            return
        scheme = self._schemes[p.module]
        grid = gridded(W, after, lambda rows: stepped(rows, scheme.bits, scheme.group_size, symmetric=True))
        if not torch.equal(grid.values(), after):
            raise CheckFailed(f"nothing written: {p.name} is not on the grids of the model's; compress it again")
        self.put(p.module, grid)

    def put(self, module: str, grid: Grid) -> None:
        """Keep the next rows of a module."""
        self._grids.setdefault(module, []).append(grid)

    def stored(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors`, with every rounded matrix replaced by its stored parts, whose memory is then released."""
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        state = dict(tensors)
        for name in [name for name in self._grids if f"{name}.weight" in state]:
            W = state.pop(f"{name}.weight")
            integers, scale = (torch.cat(rows) for rows in zip(*self._grids.pop(name), strict=True))
            packed = pack_to_int32(integers, self._schemes[name].bits), scale, torch.tensor(W.shape)
            state |= {f"{name}.{part}": tensor for part, tensor in zip(_PARTS, packed, strict=True)}
        return state

    def size(self, model: PreTrainedModel) -> int:
        """The bytes of all tensors of `model`, packed."""
        size = model_size(model).bytes
        for name, scheme in self._schemes.items():
            W: Any = model.get_submodule(name).weight
            size += scheme.size(W.shape, W.itemsize) - W.nbytes
        return size

    def write_config(self, folder: Path, model: PreTrainedModel) -> None:
        """Add the quantisation settings, which say what of `model` is packed and how, to config.json in `folder`."""
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

        dense = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in self._schemes]
        by_scheme: dict[Scheme, list[str]] = {}
        for module, scheme in self._schemes.items():
            by_scheme.setdefault(scheme, []).append(module)
        groups = {}
        for number, scheme in enumerate(sorted(by_scheme, key=lambda s: (s.bits, s.group_size or 0))):
            strategy: Any = "group" if scheme.group_size else "channel"
            weights = QuantizationArgs(
                num_bits=scheme.bits, symmetric=True, strategy=strategy, group_size=scheme.group_size
            )
            targets = by_scheme[scheme] if len(by_scheme) > 1 else ["Linear"]
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


def _changed(small: PreTrainedModel, loaded: PreTrainedModel) -> str | None:
    """The name of the first matrix that unpacking does not restore to the last bit; None if there is none."""
    for name in [name for name, module in small.named_modules() if isinstance(module, nn.Linear)]:
        W: Any = small.get_submodule(name).weight
        after = getattr(loaded.get_submodule(name), "weight", None)
        if not (isinstance(after, torch.Tensor) and after.dtype == W.dtype and torch.equal(after, W)):
            return f"{name} is unpacked to other weights"
    return None
