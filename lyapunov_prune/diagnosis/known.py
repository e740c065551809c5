"""The faults of matrices that are known: their tests, and for each kind what makes it and what to do."""

from __future__ import annotations

from collections.abc import Callable

from lyapunov_prune.diagnosis import faults

# Of a matrix against that of the dense model, the simplest explanation first.
FAULTS: tuple[Callable[[faults.Case], faults.Match | None], ...] = (
    faults.constant,
    faults.one_number,
    faults.shift,
    faults.scale,
    faults.transposed,
    faults.other_type,
    faults.other_tensor,
    faults.permuted_rows,
    faults.permuted_columns,
    faults.clipped,
    faults.row_scales,
    faults.zero_points,
    faults.block_scales,
    faults.code_table,
    faults.rotated,
    faults.initialised,
    faults.low_rank,
)

# Those that compare with all other rows or tensors, and are tried on suspects alone.
HEAVY = {faults.other_tensor, faults.permuted_rows, faults.permuted_columns, faults.low_rank}

# Kind of a fault: what made such a thing in known cases, and what to do.
KNOWN: dict[str, tuple[str, str]] = {
    "non-finite": ("a scale of zero or NaN, or a cast to float16 that overflows", "convert it again from DENSE"),
    "constant": ("a tensor that was never filled, or a scale that overflowed", "convert it again from DENSE"),
    "zero": ("a tensor that was missing in a shard and left at zero", "fetch the shard, or convert it again"),
    "shift": ("norms stored as w − 1 by one convention and read as w by the other, as in Gemma", "convert it again"),
    "sign": ("a factor of −1 taken into the weights, or left out", "convert it again"),
    "scale": ("a scale applied twice or not at all, in merging, folding or unpacking", "convert it again"),
    "transposed": ("Conv1D weights read as Linear ones, or the other order of axes", "convert it again"),
    "other tensor": ("a map of names that is off by one, or shards of two versions", "convert it again"),
    "exchanged": ("a map of names that exchanges two", "convert it again"),
    "offset": ("layers counted from one, or a layer inserted by a merge", "convert it again"),
    "head": ("tie_word_embeddings set where it is not, or lost", "convert it again with DENSE's config"),
    "permuted": (
        "query and key rows in the other rotary layout, nibbles in the other order, or tokens added in between",
        "convert it again",
    ),
    "zero point": ("zero points stored minus one by GPTQ's convention and read by another", "convert it again"),
    "block scale": ("scales read from the wrong offset", "convert it again"),
    "number": ("a bit that flipped in memory or on the way, or an integer that overflowed", "fetch the file again"),
    "repeated": ("a shard of tensor parallelism that was joined with itself", "convert it again"),
    "type": ("a header with another type than the bytes have", "convert it again"),
    "codes": ("unsigned integers read as signed, or NF4 read as FP4 or as integers", "convert it again"),
    "rotated": ("a rotation that the engine should undo, in a file for another engine", "convert it again"),
    "initialised": ("a tensor that is missing in the checkpoint, or has another name there", "convert it again"),
    "adapter": ("an adapter merged without α / r, twice, or into nothing", "merge the adapter again"),
    "saturated": ("a cast to a narrower type that clamps", "convert it again"),
    "pruned": ("a mask that was inverted, or numbers that were lost on the way", "prune DENSE again"),
    "differs": ("a stale shard, or a tensor of another model", "fetch that shard again"),
}
