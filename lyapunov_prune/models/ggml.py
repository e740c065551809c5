"""The block types of GGUF files, written by llama.cpp's own code: `ggml_quantize_chunk`, which xllamacpp exports."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Kind

from lyapunov_prune.errors import LyapunovPruneError, reported, require_extra

WIDE = (Kind.F32, Kind.F16, Kind.BF16)  # one number a block
_UNWRITTEN = {Kind.F64, Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.Q8_1, Kind.Q8_K}  # of integers, or of activations
_EXTENSIONS = ("*.so", "*.pyd", "*.dylib")


def bits_of(kind: Kind) -> float:
    """Bits of a weight, scales included."""
    items, size = GGML_QUANT_SIZES[kind]
    return 8 * size / items


def fits(kind: Kind, columns: int) -> bool:
    """Whether rows of so many columns can be written in `kind`: they are whole blocks."""
    return kind not in _UNWRITTEN and columns % GGML_QUANT_SIZES[kind][0] == 0


def quantised(values: np.ndarray, kind: Kind, importance: np.ndarray | None = None) -> np.ndarray:
    """`values` (rows × columns, float32) in blocks of `kind`: (rows × bytes of a row) uint8, as llama.cpp writes them.

    `importance` (columns,) weights the squared errors of a row, as an importance matrix does; None weights as
    llama.cpp does without one. Types of about two bits are written by it with importance only, and get equal ones.
    Raises LyapunovPruneError if rows are not whole blocks, and if xllamacpp, which a type of blocks needs, is not
    installed.
    """
    if kind in WIDE:
        return quants.quantize(np.asarray(values, np.float32), kind).view(np.uint8)
    rows, columns = values.shape
    if not fits(kind, columns):
        raise LyapunovPruneError(f"rows of {columns} numbers are no whole blocks of {kind.name}; give another type")
    ggml = _library()
    if importance is None and ggml.ggml_quantize_requires_imatrix(int(kind)):
        importance = np.ones(columns)
    given = np.ascontiguousarray(values, np.float32)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    made = np.empty((rows, columns // GGML_QUANT_SIZES[kind][0] * GGML_QUANT_SIZES[kind][1]), np.uint8)
    size = ggml.ggml_quantize_chunk(
        int(kind), _address(given), _address(made), 0, rows, columns, None if weights is None else _address(weights)
    )
    assert size == made.nbytes, f"{kind.name}: {size} bytes instead of {made.nbytes}"
    return made


def dequantised(data: np.ndarray, kind: Kind) -> np.ndarray:
    """The numbers in blocks of `kind`: (rows × bytes of a row) uint8 to (rows × columns) float32."""
    return quants.dequantize(data, kind).astype(np.float32, copy=False)


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


@cache
def _library() -> Any:
    require_extra("xllamacpp", "engines", "rounding to blocks of few bits")
    spec = importlib.util.find_spec("xllamacpp")
    places = (spec and spec.submodule_search_locations) or ()
    files = [file for place in places for pattern in _EXTENSIONS for file in Path(place).glob(pattern)]
    with reported("this xllamacpp does not export llama.cpp's quantiser", "install another version", Exception):
        library = ctypes.CDLL(str(files[0]))
        chunk, needs = library.ggml_quantize_chunk, library.ggml_quantize_requires_imatrix
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        chunk.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]
        chunk.restype, needs.argtypes, needs.restype = ctypes.c_size_t, [ctypes.c_int], ctypes.c_bool
    return library
