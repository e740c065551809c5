"""How large a model is: the bytes of its weight files, and how many bits that is a weight."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.digest import saved_tensors
from lyapunov_prune.models.from_folder import load_bare
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.loading import checkpoint_folder
from lyapunov_prune.models.quantised import is_packed
from lyapunov_prune.models.weight_files import weight_files


@dataclass(frozen=True)
class Size:
    """The `bytes` of the weight files of a model with so many `weights`.

    Packed weights count unpacked, shared ones once; scales, zero points and headers are bytes, but no weights.
    """

    bytes: int
    weights: int

    @property
    def bits(self) -> float:
        """Bits a weight, `8 · bytes / weights`."""
        return 8 * self.bytes / max(self.weights, 1)

    def told(self) -> str:
        return f"{told_bytes(self.bytes)}, {self.bits:.3g} bits a weight"


def told_bytes(size: int) -> str:
    """`size` in the largest unit that leaves a digit before the point."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}" if unit == "GB" else f"{size / scale:.1f} {unit}"
    return f"{size} B"


def model_size(model: PreTrainedModel) -> Size:
    """The size of a plain checkpoint of `model`, in the dtype that it has in memory."""
    return Size(sum(tensor.nbytes for _, tensor in saved_tensors(model)), model.num_parameters())


def stored_size(name: str | Path, model: PreTrainedModel | None = None) -> Size | None:
    """The size of the files of the model `name`, as `load` takes it.

    If they do not tell it, that of `model`, which was loaded from there; None without.
    """
    with suppress(LyapunovPruneError, OSError):
        if str(name).endswith(".gguf"):
            header = read_header(Path(name))
            return Size(sum(part.stat().st_size for part in header.parts), sum(prod(t.dims) for t in header.tensors))
        folder = checkpoint_folder(str(name), offline=True)
        if files := weight_files(folder, None):
            plain = model if model is not None and not is_packed(model) else load_bare(folder).model
            return Size(sum(file.stat().st_size for file in files), plain.num_parameters())
    return None if model is None else model_size(model)
