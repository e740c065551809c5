"""A checkpoint that stays on disk: names, shapes, places and digests of all tensors, without their numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.tensor_files import DTYPES, StoredTensor, read_into, read_tensors, reading
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.digest import combined, digests_of, saved_tensors
from lyapunov_prune.models.loading import load_outline
from lyapunov_prune.models.structure import identify
from lyapunov_prune.models.weight_files import BUFFER, TensorTarget, targets_of
from lyapunov_prune.progress import status


class Outline:
    """The model of `decoder` is on `meta`; `stored` and `targets` are keyed by the names of tensors in the files.

    They omit tensors that the model does not use, such as another program's or those of training. `sources` are the
    file tensors that each tensor of the model is made of, and `digests` those of `tensor_digests`, for a shared tensor
    under its first name; all numbers are read for them, one tensor after another.
    """

    def __init__(self, decoder: Decoder, stored: dict[str, StoredTensor], targets: dict[str, TensorTarget]) -> None:
        self.decoder, self.stored, self.targets = decoder, stored, targets
        self.sources = _sources(decoder.model, targets)
        with status("reading the weights"), reading(stored.values()):
            self.digests = digests_of(dict(saved_tensors(decoder.model)), self._tensor)
        self.identity = identify(decoder.model, combined(self.digests))

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
            tensor = self._tensor(name)
            if tensor.shape != memory.shape:
                raise LyapunovPruneError(
                    f"the checkpoint has {name} in another shape; correct its config.json, or fetch it again"
                )
            memory.copy_(tensor)  # the mapped file is read here

    def _tensor(self, own: str) -> torch.Tensor:
        """The model's tensor `own`, made of those in the files as loading makes it."""
        keys = self.sources[own]
        name, rule = self.targets[keys[0]].name, copy.deepcopy(self.targets[keys[0]].converter)
        if rule is None:
            return _stored_tensor(self.stored[keys[0]])
        for key in keys:
            tensor: Any = _stored_tensor(self.stored[key])  # the loader itself reads in threads
            rule.add_tensor(name, key, self.targets[key].pattern, tensor)
        value = rule.convert(name, model=self.model, config=self.model.config)[name]
        return value[0] if isinstance(value, list) else value


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
    return Outline(loaded, {key: stored[key] for key in targets}, targets)


def _sources(model: PreTrainedModel, targets: dict[str, TensorTarget]) -> dict[str, tuple[str, ...]]:
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


def _stored_tensor(stored: StoredTensor) -> torch.Tensor:
    """The tensor in its file, mapped; a small one is read, which takes a fraction of the time of a map."""
    dtype = DTYPES.get(stored.dtype)
    if dtype is not None and stored.size <= BUFFER:
        tensor = torch.empty(stored.shape, dtype=dtype)
        read_into(tensor, stored)
        return tensor
    with safe_open(stored.file, framework="pt") as file:
        return file.get_tensor(stored.key)
