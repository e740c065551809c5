"""Results as JSON values: dataclasses, numbers that JSON lacks, and arrays with their types."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import cattrs
import numpy as np
from cattrs.v import format_exception

from lyapunov_prune.errors import LyapunovPruneError

T = TypeVar("T")
# Arrays of these types are plain JSON lists; others, and empty ones, store type and shape.
_PLAIN = (np.bool_, np.int64, np.float64)


def _encode_array(array: np.ndarray) -> Any:
    values = encode(array.tolist())
    plain = array.size and array.dtype in _PLAIN
    return values if plain else {"dtype": str(array.dtype), "shape": list(array.shape), "values": values}


def _decode_array(value: Any, _: Any) -> np.ndarray:
    if isinstance(value, dict):
        return np.array(value["values"], value["dtype"]).reshape(value["shape"])
    array = np.array(value)
    return array if array.size and array.dtype in _PLAIN else np.array(value, np.float64)  # np.array parses "nan"


def _decode_number_or_word(value: Any, _: Any) -> float | str:
    return value if isinstance(value, str) and value not in ("nan", "inf", "-inf") else float(value)


_converter = cattrs.Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})
for _number in (bool, int):  # such fields may hold numpy's numbers
    _converter.register_unstructure_hook(_number, _number)
_converter.register_unstructure_hook(float, lambda x: float(x) if math.isfinite(x) else str(x))
_converter.register_unstructure_hook(np.generic, lambda x: encode(x.item()))
_converter.register_unstructure_hook(np.ndarray, _encode_array)
_converter.register_structure_hook(np.ndarray, _decode_array)
_converter.register_structure_hook(float | str, _decode_number_or_word)


def encode(value: Any) -> Any:
    """`value` as JSON values: dataclasses become dictionaries, numpy's numbers and arrays numbers and lists."""
    return _converter.unstructure(value)


def decode(kind: type[T], value: Any) -> T:
    """The inverse of `encode`, by the annotations of `kind`. Raises ValueError naming a field that does not fit."""
    try:
        return _converter.structure(value, kind)
    except cattrs.BaseValidationError as error:
        raise ValueError(cattrs.transform_error(error, format_exception=_reason)[0]) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _reason(error: BaseException, kind: type | None) -> str:
    return error.message if isinstance(error, LyapunovPruneError) else format_exception(error, kind)
