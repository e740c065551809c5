"""Integers in 32-bit words beside their scales: compressed-tensors, GPTQ and AWQ, a sample of each matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import numpy as np

from lyapunov_prune.diagnosis.statistics import as_floats
from lyapunov_prune.diagnosis.stored import FileTensor, Stored
from lyapunov_prune.models.table import READERS

# Ends of the names of what belongs to one packed matrix; the first holds its integers.
COMPRESSED = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
GROUPED = (".qweight", ".scales", ".qzeros", ".g_idx")
# Ends of scales that other libraries keep beside a matrix (fp8, calibrated inputs).
BESIDE = (
    ".weight_scale_inv",
    ".input_scale",
    ".weight_global_scale",
    ".k_scale",
    ".v_scale",
    ".scale_inv",
    ".output_scale",
)
SCALES = (".weight_scale", ".scales", ".weight_scale_inv")
_AT_ONCE = 2**16  # numbers of a matrix that are unpacked
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@cache
def _ends() -> tuple[str, ...]:
    """What a name ends in if its tensor is kept in place of a matrix, by any reader, or beside one."""
    read = [f".{part}" for reader in READERS.values() for part in reader.parts]
    return (*COMPRESSED, *GROUPED, *BESIDE, *read)


def matrix_of(name: str) -> str:
    """The matrix that a tensor is part of: `q_proj.weight` for `q_proj.qweight` and `q_proj.scales`."""
    for end in _ends():
        if name.endswith(end):
            return f"{name.removesuffix(end)}.weight"
    return name


@dataclass(frozen=True)
class PackedMatrix:
    """A packed matrix: its name without an end, shape (outputs, inputs) and bits, and the tensors of its parts.

    `codes`, `zeros` and `scales` are a sample in one order, (groups, numbers of a group) and twice (groups,); the codes
    are those that are stored, from 0 to 2^bits − 1, and so are the zeros.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    integers: FileTensor
    scale: FileTensor

    @property
    def centred(self) -> float:
        """The mean of integer minus zero point, in steps: near 0 for weights, near ±1 by the other convention."""
        known = self.codes.std(1) > 0
        return float((self.codes[known] - self.zeros[known, None]).mean()) if known.any() else 0.0

    @property
    def lost(self) -> int:
        """Groups whose scale is zero although their integers differ."""
        return int(((self.scales == 0) & (np.ptp(self.codes, axis=1) > 1)).sum())

    @property
    def saturated(self) -> float:
        """The share of integers at the ends of their range."""
        return float(((self.codes == 0) | (self.codes == 2**self.bits - 1)).mean())


def packed_matrices(stored: Stored) -> Iterator[PackedMatrix]:
    """A sample of every packed matrix whose layout is known."""
    settings = stored.setting("quantization_config", "compression_config")
    if not isinstance(settings, dict):
        return
    for name in stored.parts:
        try:
            if name.endswith(COMPRESSED[0]):
                yield _compressed(stored.parts, name.removesuffix(COMPRESSED[0]), settings)
            elif name.endswith(GROUPED[0]):
                yield _grouped(stored.parts, name.removesuffix(GROUPED[0]), settings)
        except (KeyError, ValueError, ZeroDivisionError, TypeError, AttributeError, IndexError):
            continue  # what does not fit is told by `shapes`


def _compressed(parts: Mapping[str, FileTensor], name: str, settings: Mapping[str, Any]) -> PackedMatrix:
    packed, scale = (parts[name + end] for end in COMPRESSED[:2])
    groups = [each["weights"] for each in settings["config_groups"].values()]
    shape = parts.get(name + COMPRESSED[3])
    rows, columns = packed.shape[0], packed.shape[1] * 32 // groups[0]["num_bits"]
    if shape is not None:
        rows, columns = (int(n) for n in np.fromfile(shape.file, np.int64, 2, offset=shape.start))
    bits = next(each["num_bits"] for each in groups if ceil(columns * each["num_bits"] / 32) == packed.shape[1])
    width = columns // scale.shape[1]
    chosen = _some(rows, columns)
    codes = _unpacked(_rows(packed)[chosen], bits)[:, :columns].reshape(-1, width)
    zeros = np.full(len(codes), 2 ** (bits - 1), np.int16)
    if (zero := parts.get(name + COMPRESSED[2])) is not None:  # packed along rows
        zeros = _unpacked(_rows(zero).T, bits).T[chosen].reshape(-1)
    return PackedMatrix(name, (rows, columns), bits, codes, zeros, _scales(scale, chosen), packed, scale)


def _grouped(parts: Mapping[str, FileTensor], name: str, settings: Mapping[str, Any]) -> PackedMatrix:
    packed, scale, zero = (parts[name + end] for end in GROUPED[:3])
    bits = int(settings.get("bits") or settings.get("w_bit") or 4)
    groups, outputs = scale.shape
    if packed.shape[1] == outputs:  # GPTQ: words along inputs
        inputs, order = packed.shape[0] * 32 // bits, None
    elif packed.shape[1] * 8 == outputs and bits == 4:  # AWQ: words along outputs, eight in an order of its own
        inputs, order = packed.shape[0], np.argsort(_AWQ_ORDER)
    else:
        raise ValueError(name)
    width = inputs // groups
    chosen = _some(groups, width * outputs)
    held, words = _unpacked(_rows(zero)[chosen], bits), _rows(packed).reshape(groups, -1, packed.shape[1])[chosen]
    if order is None:
        codes = _unpacked(np.moveaxis(words, 1, 2), bits)
        held = held + (str(settings.get("checkpoint_format") or "gptq") == "gptq")  # it stores zero points minus one
    else:
        ordered = [
            _unpacked(some, bits).reshape(*some.shape[:-1], -1, 8)[..., order] for some in (words, _rows(zero)[chosen])
        ]
        codes, held = (some.reshape(*some.shape[:-2], -1) for some in ordered)
        codes = np.moveaxis(codes, 1, 2)
    zeros, scales = held[:, :outputs].reshape(-1), _scales(scale, chosen)
    return PackedMatrix(name, (outputs, inputs), bits, codes.reshape(-1, width), zeros, scales, packed, scale)


def _some(rows: int, numbers: int) -> np.ndarray:
    """Rows, of so many numbers each (or all together, for a whole matrix), that are a sample."""
    return np.unique(np.linspace(0, rows - 1, min(rows, max(1, _AT_ONCE // max(1, numbers)))).astype(int))


def _scales(scale: FileTensor, chosen: np.ndarray) -> np.ndarray:
    data = np.memmap(scale.file, np.uint8, "r", scale.start, (scale.size,)).reshape(scale.shape[0], -1)
    return as_floats(np.ascontiguousarray(data[chosen]), scale.dtype).reshape(-1)


def _rows(part: FileTensor) -> np.ndarray:
    """The words of a tensor, (rows, words), mapped."""
    return np.memmap(part.file, "<u4", "r", part.start, (part.size // 4,)).reshape(part.shape[0], -1)


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The integers in words along the last axis, packed without gaps, the lowest bits first."""
    held = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    held = held[..., : held.shape[-1] // bits * bits].reshape(*held.shape[:-1], -1, bits)
    return (held.astype(np.int16) << np.arange(bits, dtype=np.int16)).sum(-1, dtype=np.int16)
