"""The .gguf file that a model was read from: which model it holds, and what can go of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.cache import BUILTIN, CacheEntry, builtin_place
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.gguf import SUFFIX, source_file
from lyapunov_prune.models.gguf_header import Header, read_header
from lyapunov_prune.models.gguf_layers import full_attention, values_without
from lyapunov_prune.models.kinds import LayerKinds
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.results.files import require_empty
from lyapunov_prune.results.result import ModelIdentity


def require_gguf(name: str, plan: PruningPlan) -> Header:
    """The header of the file that the model `name` was read from.

    Raises LyapunovPruneError for a model of another kind of file, and a plan that llama.cpp's header cannot express.
    """
    header = read_header(source_file(name))
    if plan.drops_parts or header.layers != plan.model.num_layers:
        raise LyapunovPruneError(
            f"the GGUF file of {name} has {header.layers} layers and can lose whole ones only; this plan is for "
            f"{plan.model.num_layers}{' and drops parts of them' * plan.drops_parts}; give --layers, or export a folder"
        )
    values_without(header, plan.kept)
    return header


def require_file(target: str | Path) -> None:
    """Raise LyapunovPruneError unless a GGUF file can be written to `target`."""
    if not str(target).endswith(SUFFIX):
        raise LyapunovPruneError(f"{target} is not the name of a GGUF file; end --output in {SUFFIX}")
    require_empty(target, folder=False)


def gguf_identity(name: str, *, planned: bool) -> ModelIdentity:
    """Which model the GGUF file of `name` holds, from its header; for a plan by its weights.

    The weights are known if the file was dequantised before, as ranking does; raises LyapunovPruneError if it was not.
    """
    source = source_file(name)
    if planned:
        folder = builtin_place() if name == BUILTIN else CacheEntry(source).folder
        if not (folder / "config.json").is_file():
            raise LyapunovPruneError(
                f"a plan names its model by dequantised weights, and those of {name} are not in the cache; give "
                "--layers, or leave out --device disk"
            )
        return read_outline(folder, name).identity
    header = read_header(source)
    shapes = sorted((tensor.name, tensor.dims) for tensor in header.tensors)
    return ModelIdentity(
        name=name,
        model_type=header.architecture,
        num_layers=header.layers,
        parameters=sum(prod(dims) for _, dims in shapes),
        architecture=hashlib.sha256(repr(shapes).encode()).hexdigest(),
        weights={},
    )


def gguf_period(name: str) -> int:
    """After how many layers windows repeat in the GGUF file of `name`; 1 if layers are alike or nothing repeats."""
    full = full_attention(read_header(source_file(name))) or (True,)
    return LayerKinds(tuple(map(int, full))).period or 1


@dataclass(frozen=True, eq=False)
class Original:
    """The GGUF file from which another is made, with only the layers `kept`.

    `before` holds the tensors of its model under the names that they have without the other layers.
    """

    header: Header
    kept: tuple[int, ...]
    before: Mapping[str, torch.Tensor]


def original_of(decoder: Decoder, plan: PruningPlan | None = None) -> Original:
    """The file that `decoder` was read from, without the layers of `plan`.

    Raises LyapunovPruneError for a model of another kind of file, and a plan that llama.cpp's header cannot express.
    """
    name, before = decoder.model.config._name_or_path, decoder.model.state_dict()
    if plan is None:
        header = read_header(source_file(name))
        return Original(header, tuple(range(header.layers)), before)
    header, stays = require_gguf(name, plan), {own: decoder.structure.renamed(own, plan.kept) for own in before}
    return Original(header, plan.kept, {new: before[own] for own, new in stays.items() if new is not None})
