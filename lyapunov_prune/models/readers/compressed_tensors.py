"""Packed integers of compressed-tensors, which its library unpacks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from math import ceil
from typing import TYPE_CHECKING, Any

from lyapunov_prune.errors import LyapunovPruneError, require_extra
from lyapunov_prune.models.reader import UNPACK, Reader

if TYPE_CHECKING:
    import torch
    from torch import nn

PACKER = "compressed_tensors", "packed", "packing weights"  # library, extra, and what needs it
PACK = "pack-quantized"  # the library's name for integers of few bits packed into 32-bit words
_ORDERED = ("group", "dynamic", "true")  # what compressed-tensors no longer knows
# The order of columns is left out on unpacking, and transformers leaves out the zero points of experts.
_UNREAD = re.compile(r"\.weight_g_idx$|\.experts\.\d+\..*weight_zero_point$")
_NOT_READ = f"which transformers does not apply when it unpacks; {UNPACK}"


class CompressedTensors(Reader):
    """Integers of 2 to 8 bits, in several groups of modules with bits of their own.

    Quantised activations or caches are refused, because a dense model would leave out their rounding.
    """

    help = "integers of few bits in 32-bit words, scaled by row or group"
    reference = "compressed-tensors, `pack-quantized`"
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")

    def reads(self) -> bool:
        groups = self.settings.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            return False
        more = [self.settings.get(key) for key in ("kv_cache_scheme", "transform_config", "sparsity_config")]
        return not any(more) and all(_holds_integers(group, self.settings.get("format")) for group in groups.values())

    def require(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Refuse an order of columns, zero points of experts, and scales that would be broadcast over their matrices.

        A matrix of m rows is packed as (m, ⌈n · bits / 32⌉) with scales (m, 1) or (m, n / group size). With several
        groups a matrix must fit one that names it, or any group if none does (files may use other names).
        """
        require_extra(*PACKER)
        groups = list(self.settings["config_groups"].values())
        if any(str(group["weights"].get("actorder")).lower() in _ORDERED for group in groups):
            raise LyapunovPruneError(f"the columns of its groups are in an order of their own (actorder), {_NOT_READ}")
        if unread := [name for name in shapes if _UNREAD.search(name)]:
            raise LyapunovPruneError(f"the checkpoint holds {unread[0]}, {_NOT_READ}")
        for name in [name for name in shapes if name.endswith(".weight_packed")]:
            module = name.rpartition(".")[0]
            scale = shapes.get(f"{module}.weight_scale", [0, 0])
            named = [group for group in groups if module in (group.get("targets") or ())] or groups
            if not any(_fits(shapes[name], scale, group["weights"]) for group in named):
                raise ValueError(f"{name} has scales of shape {tuple(scale)}, which are not its own")

    def unpack(self, stored: Mapping[str, torch.Tensor], name: str, module: nn.Module) -> torch.Tensor:
        from compressed_tensors.compressors import BaseCompressor

        with unlogged():
            unpacked = BaseCompressor.get_value_from_registry(PACK).decompress(dict(stored), self._group(name, module))
        return unpacked["weight"]

    def _group(self, name: str, module: nn.Module) -> Any:
        """The settings of the group that names a module, as the library has them; of all if there is only one."""
        from compressed_tensors.utils.match import match_targets

        first, *others = self._groups
        owner = {target: group for group in self._groups for target in group.targets}
        found = match_targets(name, module, owner) if others else ()
        if others and not found:
            raise ValueError(f"{name} is packed, and no group of the config names it")
        return owner[found[0]] if found else first

    @cached_property
    def _groups(self) -> list[Any]:
        from transformers import CompressedTensorsConfig

        return list(CompressedTensorsConfig.from_dict(self.settings).quantization_config.config_groups.values())


def _holds_integers(group: Any, format: Any) -> bool:
    """Whether a group in the config packs integer weights and does not quantise activations."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        return False
    weights = group["weights"]
    known = weights.get("type") == "int" and weights.get("strategy") in ("channel", "group")
    activations = group.get("input_activations") or group.get("output_activations")
    return known and not activations and (group.get("format") or format) == PACK


def _fits(packed: Sequence[int], scale: Sequence[int], weights: dict[str, Any]) -> bool:
    rows, words = packed
    if len(scale) != 2 or scale[0] != rows:
        return False
    if weights["strategy"] != "group":
        return scale[1] == 1
    return ceil(scale[1] * weights["group_size"] * weights["num_bits"] / 32) == words


@contextmanager
def unlogged() -> Iterator[None]:
    """Silence the library, which warns for every packed matrix on the `meta` device that its shape is a guess."""
    if find_spec("loguru") is None:  # the library's own
        yield
        return
    from loguru import logger

    logger.disable("compressed_tensors")
    try:
        yield
    finally:
        logger.enable("compressed_tensors")
