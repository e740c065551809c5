"""The weight files of a checkpoint, none outside its folder, and the tensors of the model that those in them fill."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.models.quantised import PLAIN, unpacker
from lyapunov_prune.models.reader import UNPACK, Reader
from lyapunov_prune.models.structure import Structure

BUFFER = 2**18  # fits into the CPU cache: with 1 MB a copy takes at least twice as long
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers' names
_PACKED = {"I32": 16, "U8": 4, "I8": 4}  # the most weights in one integer of these
_OF_A_RANK = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$")


class TensorHeader(NamedTuple):
    """The file of a tensor, its dtype as safetensors writes it (`F32`, `I8`), and its shape."""

    file: Path
    dtype: str
    shape: Sequence[int]


def weight_files(folder: Path, named: str | None) -> list[Path]:
    """The files that hold the weights in `folder`: one, or all that an index names; [] if there are none.

    `named` is the config's `transformers_weights`, a file or index that takes precedence over the usual names. Raises
    LyapunovPruneError for a missing file, and for a name that is not a safetensors file in the folder itself:
    transformers unpickles files of unknown endings and follows any path.
    """
    ranked = [file.name for file in folder.glob("shard-*.safetensors") if _OF_A_RANK.match(file.name)]
    if ranked:  # transformers then ignores all other files
        raise LyapunovPruneError(f"{folder} holds the shards of a distributed run ({ranked[0]}); save the model whole")
    usual = (name for name in (SINGLE, INDEX) if (folder / name).is_file())
    name = next(usual, None) if named is None else named
    if name is None:
        return []
    names = sorted({*weight_map(folder, name).values()}) or [name]
    return [_inside(folder, name) for name in names]


def weight_map(folder: Path, name: Any) -> dict[str, str]:
    """The file of each tensor, as the index `name` in `folder` says; {} if `name` is no index."""
    if not (isinstance(name, str) and name.endswith(".safetensors.index.json")):
        return {}
    index = _inside(folder, name, ".json")
    what = f"{index} is not an index of weights and may be truncated or corrupt"
    failures = OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError
    with reported(what, "fetch it again", *failures):
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        sorted({*files.values()})  # fails unless all are names
    return files


def require_indexed(folder: Path, named: str | None) -> None:
    """Raise LyapunovPruneError if files in `folder` disagree on where a tensor is.

    transformers takes the copy in the last file, whatever the index says, and one file rather than an index beside it.
    """
    single, indexed = ((folder / name).is_file() for name in (SINGLE, INDEX))
    meant = weight_map(folder, INDEX if named is None and indexed else named)
    if named is None and single:
        others = sorted(name for name in {*meant.values()} - {SINGLE} if (folder / name).is_file())
        if others:
            raise LyapunovPruneError(
                f"{folder} holds {SINGLE}, and {INDEX} names {others[0]}; move away what is not meant, or "
                "name in config.json, as transformers_weights, what is"
            )
        return
    for path in weight_files(folder, named) if meant else ():
        with safe_open(path, framework="pt") as file:
            names = file.keys()
        for key in names:
            if meant.get(key, path.name) != path.name:
                raise LyapunovPruneError(
                    f"{path} holds {key}, which the index gives to {meant[key]}; lyapunov-prune check {folder} "
                    "lists what is wrong"
                )


def headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """What these files say of each of their tensors, by name."""
    held: dict[str, TensorHeader] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            held |= {key: TensorHeader(path, part.get_dtype(), part.get_shape()) for key, part in slices.items()}
    return held


def require_plain(held: Mapping[str, TensorHeader], reader: Reader | None) -> None:
    """Raise LyapunovPruneError for matrices in 8 bits that `reader` does not unpack: they would lose their scales."""
    numbers, *beside = (PLAIN,) if reader is None else reader.parts
    for key, header in held.items():
        module, _, part = key.rpartition(".")
        in_8_bits = header.dtype.startswith("F8_") or (header.dtype in ("I8", "U8") and part == PLAIN)
        if in_8_bits and (part != numbers or not any(f"{module}.{other}" in held for other in beside)):
            raise LyapunovPruneError(
                f"{header.file} holds {key} in {header.dtype}, and no scales that would be applied; {UNPACK}"
            )


def numbers_held(held: Mapping[str, TensorHeader]) -> int:
    """The most numbers that these tensors can hold: integers may be packed ones of 2 bits."""
    return sum(prod(header.shape) * _PACKED.get(header.dtype, 1) for header in held.values())


def read_parts(path: Path, start: int, size: int) -> Iterator[memoryview]:
    """The `size` bytes from `start` of the file at `path`, in parts that reuse one buffer.

    Raises OSError if the file ends first.
    """
    buffer = memoryview(bytearray(min(size, BUFFER)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size:
            part = buffer[:size]
            fill(part, file)
            yield part
            size -= len(part)


def fill(memory: memoryview, file: FileIO) -> None:
    """Read from `file` until `memory` is full; raises OSError if the file ends first."""
    while len(memory):
        count = file.readinto(memory)
        if not count:
            raise OSError(f"{file.name!s} became shorter while it was read")
        memory = memory[count:]


def require_every_layer(where: Path, layers: Any, found: Collection[int | None]) -> None:
    """Raise LyapunovPruneError unless tensors of all of the `layers` (a number) are `found` in the checkpoint."""
    if not isinstance(layers, int) or len(set(found)) != layers or set(found) != set(range(layers)):
        raise LyapunovPruneError(
            f"{where} says that it has {layers} layers and holds tensors of {len(found)}; lyapunov-prune check {where} "
            "lists what is wrong"
        )


def _inside(folder: Path, name: Any, suffix: str = ".safetensors") -> Path:
    why = ""
    if not (isinstance(name, str) and name.endswith(suffix)):
        why = "and only safetensors files are read; convert it to safetensors"
    elif Path(name).name != name:  # compared by name: in the hub's cache every file is a link to another place
        why = "which is not a file of that folder; move it there"
    elif not (folder / name).is_file():
        why = f"and lacks it; lyapunov-prune check {folder} lists what is wrong"
    if why:
        raise LyapunovPruneError(f"{folder} names {name} as weights, {why}")
    return folder / name


@dataclass(frozen=True)
class TensorTarget:
    """The tensor of the model that is filled, and the conversion applied on loading; None if it is only renamed."""

    name: str
    converter: WeightConverter | None = None
    pattern: str = ""


def targets_of(model: PreTrainedModel, keys: Iterable[str]) -> tuple[dict[str, TensorTarget], dict[str, str]]:
    """Map `keys`, names of tensors in the files of `model`, to their targets; and keys without a target to new names.

    Follows transformers' loader: a key is renamed, then converted by at most one rule, with or without the prefix of
    the base model. The new names of keys without a target are those after renaming.
    """
    rules = get_model_conversion_mapping(model, hf_quantizer=unpacker(model.config))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    targets: dict[str, TensorTarget] = {}
    others: dict[str, str] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            others[key] = name
        else:
            targets[key] = TensorTarget(name, by_pattern[pattern], pattern) if pattern else TensorTarget(name)
    packed = {target.name for target in targets.values() if target.pattern not in ("", PLAIN)}
    plain = {key for key, target in targets.items() if target.pattern == PLAIN and target.name not in packed}
    targets |= {key: TensorTarget(targets[key].name) for key in plain}  # a reader's rule leaves them alone
    return targets, others


def stored_path(structure: Structure, targets: Mapping[str, TensorTarget]) -> str:
    """The path in front of the layer number in the names of a checkpoint.

    Raises LyapunovPruneError if the names do not share one such path.
    """
    inside = f"{structure.layers_path}."
    paths: set[tuple[str, ...]] | None = None
    for key, target in targets.items():
        if target.name.startswith(inside):
            number = target.name.removeprefix(inside).partition(".")[0]
            parts = tuple(key.split("."))
            before = {parts[:place] for place, part in enumerate(parts) if part == number}
            paths = before if paths is None else paths & before
    if paths is None or len(paths) != 1:
        raise LyapunovPruneError(
            f"the checkpoint numbers the layers of {structure.model_type} in another way than the model; prune it in "
            "memory"
        )
    return ".".join(paths.pop())
