"""A checkpoint that stays on disk: names, shapes, places and digests of all tensors, without their numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.tensor_files import BUFFER, DTYPES, Stored, read_into, read_tensors, reading
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.digest import combined, digests_of, saved_tensors
from lyapunov_prune.models.loading import load_outline
from lyapunov_prune.models.stored_names import Target, targets_of
from lyapunov_prune.models.structure import identify
from lyapunov_prune.progress import status
from lyapunov_prune.results.result import ModelIdentity


@dataclass(frozen=True)
class Outline:
    """The model of `decoder` is on `meta`; `stored` and `targets` are keyed by the names of tensors in the files.

    They omit tensors that the model does not use, such as another program's or those of training.
    """

    decoder: Decoder
    stored: dict[str, Stored]
    targets: dict[str, Target]
    sources: dict[str, tuple[str, ...]]  # by tensor name in the model: the file tensors it is made of
    digests: dict[str, dict[str, str]]  # by tensor in the model, under its first name
    identity: ModelIdentity

    @property
    def model(self) -> PreTrainedModel:
        return self.decoder.model

    def sizes(self) -> list[tuple[str, int]]:
        """The bytes of every tensor in the files, with its name in the model."""
        return [(target.name, self.stored[key].size) for key, target in self.targets.items()]

    def fill(self, memory: torch.Tensor, name: str) -> None:
        """Read the model's tensor `name` from the files into `memory`, converted to its dtype.

        Raises LyapunovPruneError if the shape differs, or if a file is missing or has changed.
        """
        key, *more = self.sources[name]
        stored = self.stored[key]
        as_it_is = not more and self.targets[key].converter is None and DTYPES.get(stored.dtype) == memory.dtype
        with reading([stored, *map(self.stored.__getitem__, more)]):
            if as_it_is and memory.device.type == "cpu" and stored.shape == memory.shape:
                read_into(memory, stored)
                return
            tensor = _read(self.model, self.sources[name], self.stored, self.targets)
            if tensor.shape != memory.shape:
                raise LyapunovPruneError(f"the checkpoint has {name} in another shape; fetch it again")
            memory.copy_(tensor)  # the mapped file is read here


def read_outline(
    folder: Path, name: str | Path, dtype: torch.dtype | None = None, *, text_only: bool = False
) -> Outline:
    """Read the headers of the checkpoint in `folder`, and all numbers once for the digests that identify it.

    The model has the dtypes that loading in `dtype` would give; None keeps the checkpoint's. Packed integers are
    unpacked while reading, as `load` does.

    Raises LyapunovPruneError for what cannot be loaded whole, for weights that stay packed, and for a decoder that
    cannot be judged without running it.
    """
    loaded = load_outline(folder, name, dtype, text_only=text_only)
    with reading(()):
        stored = read_tensors(folder, getattr(loaded.model.config, "transformers_weights", None))
    targets, _ = targets_of(loaded.model, stored)
    stored = {key: stored[key] for key in targets}
    sources = _sources(loaded.model, targets)
    digests = _digests(loaded.model, stored, targets, sources)
    identity = identify(loaded.model, combined(digests))
    return Outline(loaded, stored, targets, sources, digests, identity)


def _sources(model: PreTrainedModel, targets: dict[str, Target]) -> dict[str, tuple[str, ...]]:
    """The file tensors behind every tensor name of the model; tied names have the same."""
    keys: dict[str, list[str]] = {}
    for key, target in targets.items():
        keys.setdefault(target.name, []).append(key)
    state = model.state_dict(keep_vars=True)
    shared: dict[int, list[str]] = {}
    for name, tensor in state.items():
        shared.setdefault(id(tensor), []).append(name)
    sources: dict[str, tuple[str, ...]] = {}
    for name, tensor in state.items():
        source = next((other for other in shared[id(tensor)] if other in keys), None)
        if source is None:
            raise LyapunovPruneError(f"the checkpoint has no tensor for {name} alone; take it in memory")
        sources[name] = tuple(keys[source])
    return sources


def _digests(
    model: PreTrainedModel,
    stored: dict[str, Stored],
    targets: dict[str, Target],
    sources: dict[str, tuple[str, ...]],
) -> dict[str, dict[str, str]]:
    """`tensor_digests` of every tensor of the model, read from the files one after another."""

    def read(name: str) -> torch.Tensor:
        return _read(model, sources[name], stored, targets)

    with status("reading the weights"), reading(stored.values()):
        return digests_of(dict(saved_tensors(model)), read)


def _read(
    model: PreTrainedModel, keys: Sequence[str], stored: dict[str, Stored], targets: dict[str, Target]
) -> torch.Tensor:
    name, rule = targets[keys[0]].name, copy.deepcopy(targets[keys[0]].converter)
    if rule is None:
        return _stored_tensor(stored[keys[0]])
    for key in keys:
        tensor: Any = _stored_tensor(stored[key])  # the loader itself reads in threads
        rule.add_tensor(name, key, targets[key].pattern, tensor)
    value = rule.convert(name, model=model, config=model.config)[name]
    return value[0] if isinstance(value, list) else value


def _stored_tensor(stored: Stored) -> torch.Tensor:
    """The tensor in its file, mapped; a small one is read, which takes a fraction of the time of a map."""
    dtype = DTYPES.get(stored.dtype)
    if dtype is not None and stored.size <= BUFFER:
        tensor = torch.empty(stored.shape, dtype=dtype)
        read_into(tensor, stored)
        return tensor
    with safe_open(stored.file, framework="pt") as file:
        return file.get_tensor(stored.key)
