"""A folder of packed integers: the groups of compressed-tensors that vLLM and transformers load.

Embeddings, head and all that is no `Linear` of a layer stay in 16 bits: vLLM's releases pack none of them, or the
embedding alone. Zero points are left out, since plain transformers does not load them (`export.packed`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.budget.fisher import matrices_of
from lyapunov_prune.budget.storage import Chosen, RoundedModel, Storage
from lyapunov_prune.checkpoints.cards import write_card
from lyapunov_prune.compression.grids import Grid, fitted, gridded
from lyapunov_prune.errors import require_extra
from lyapunov_prune.export.packed import LOADING, Packing, Scheme, packed_folder, require_packable
from lyapunov_prune.export.streamed import packed_on_disk
from lyapunov_prune.forward.logits import TOKENS, sample_inputs, uncached_logits
from lyapunov_prune.models.decoder import Decoder, wrap_any
from lyapunov_prune.models.digest import saved_tensors
from lyapunov_prune.models.hooked import calls_noted
from lyapunov_prune.models.how import Stored
from lyapunov_prune.models.readers.compressed_tensors import PACKER
from lyapunov_prune.models.structure import in_eval_mode, model_name
from lyapunov_prune.progress import track
from lyapunov_prune.results.files import require_disk, whole_folder
from lyapunov_prune.results.history import HISTORY, history_with
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.worth import Worth

# What vLLM has kernels for, as transformers loads it. A scale a row is for rows that no group divides.
SCHEMES = (Scheme(4), Scheme(4, 128), Scheme(4, 64), Scheme(4, 32), Scheme(8), Scheme(8, 32))
DENSE = Scheme(16)
_ALIKE = (Scheme(4, 128), Scheme(4, 32), Scheme(8))
_BYTES = 2  # of a scale, and of a weight that is not packed
_PLACE = 160  # bytes in a header for a tensor's name and place, at most
_PARTS = 3  # tensors of a packed matrix
_ABOUT = """Every matrix of the layers is stored in groups of 4 or 8 bits, or in 16, whichever its share of the loss
deserves (`lyapunov-prune shrink --size`). The model has not been trained afterwards."""


class Schemes(Storage):
    """The types of the matrices of one model.

    Scales, and all that is not packed, are written in 16 bits: in the model's dtype if it has them, else in bfloat16.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Raises LyapunovPruneError without the library, and for a model that cannot be packed (`require_packable`)."""
        require_extra(*PACKER)
        modules = list(dict.fromkeys(p.module for p in require_packable(decoder.model, None)))
        self._packed = {f"{module}.weight" for module in modules}
        self._wide = decoder.model.dtype.itemsize > _BYTES
        self._dtype = torch.bfloat16 if self._wide else decoder.model.dtype
        self.together = reading_alike(decoder, modules)

    def kinds_for(self, matrix: str, columns: int, bits: float = 0.0) -> Sequence[Scheme]:
        """vLLM reads rows of whole words of 32 bits."""
        fitting = [k for k in SCHEMES if columns % (k.group_size or 1) == 0 and columns * k.bits % 32 == 0]
        return [*fitting, DENSE] if matrix in self._packed else [DENSE]

    def alike(self, bits: float) -> Sequence[Scheme]:
        return _ALIKE

    def bits_of(self, kind: Scheme) -> float:
        return kind.bits + (8 * _BYTES / kind.group_size if kind.group_size else 0)

    def block(self, kind: Scheme) -> int:
        return kind.group_size or 0

    def size_in(self, kind: Scheme, shape: Sequence[int]) -> int:
        return _BYTES * prod(shape) if kind == DENSE else kind.size(shape, _BYTES)

    def stored(self, W: np.ndarray, kind: Scheme, importance: np.ndarray) -> Stored:
        given = torch.from_numpy(W).to(self._dtype)
        return (given,) if kind == DENSE else _grid(given, kind, importance)

    def read(self, stored: Stored, kind: Scheme) -> np.ndarray:
        values: np.ndarray = (stored[0] if kind == DENSE else Grid(*stored).values()).float().numpy()
        return values

    def head(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None) -> int:
        matrices = matrices_of(decoder.model)
        others = [tensor for name, tensor in saved_tensors(decoder.model) if name not in matrices]
        tensors = len(others) + len(matrices) + (_PARTS - 1) * len(self._packed)
        return sum(_BYTES * t.numel() if self._narrows(t) else t.nbytes for t in others) + _PLACE * tensors

    def made(
        self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None, target: str | Path, chosen: Chosen
    ) -> RoundedModel:
        names = [name for name in matrices_of(decoder.model) if chosen[name].kind != DENSE]
        packing = Packing({name.removesuffix(".weight"): chosen[name].kind for name in names})

        def change(model: PreTrainedModel, layer: int) -> None:
            for name in names:
                if decoder.structure.layer_of(name) == layer:
                    W, (kind, importance, stored) = model.get_parameter(name).data, chosen[name]
                    grid = _grid(W.to(self._dtype), kind, importance) if stored is None else Grid(*stored)
                    packing.put(name.removesuffix(".weight"), grid)
                    W.copy_(grid.values())

        def describe(folder: Path, saw: Sequence[MeasuredOn], worth: Worth) -> None:
            history_with("shrink", saw, decoder.model).save(folder / HISTORY)
            title = f"{Path(model_name(decoder.model)).name}, rounded"
            write_card(folder, title, _ABOUT, decoder.model, LOADING, worth=worth)

        if decoder.stream is not None:
            dtype = self._dtype if self._wide else None
            rounded, place, size = packed_on_disk(decoder, tokenizer, Path(target), packing, change, dtype)

            def move(saw: Sequence[MeasuredOn], worth: Worth) -> int:
                with whole_folder(target) as folder:
                    for file in place.iterdir():
                        file.rename(folder / file.name)
                    describe(folder, saw, worth)
                return size

            return RoundedModel(rounded, move)
        small = wrap_any(copy.deepcopy(decoder.model))
        tensors = [tensor for _, tensor in saved_tensors(small.model) if self._narrows(tensor)]
        for tensor in tensors:
            tensor.data = tensor.data.to(self._dtype).to(tensor.dtype)
        for layer in track(range(small.structure.num_layers), "rounding"):
            change(small.model, layer)

        def write(saw: Sequence[MeasuredOn], worth: Worth) -> int:
            for tensor in tensors:
                tensor.data = tensor.data.to(self._dtype)
            size = packing.size(small.model)
            require_disk(Path(target).parent, size, "the tensors of the model")
            with packed_folder(small.model, tokenizer, target, packing) as folder:
                describe(folder, saw, worth)
            return size

        return RoundedModel(small, write)

    def _narrows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is written in fewer bits than it has in memory."""
        return self._wide and tensor.is_floating_point()


def _grid(W: torch.Tensor, kind: Scheme, importance: np.ndarray) -> Grid:
    columns = torch.from_numpy(importance).to(W.device)
    return gridded(W, W, lambda rows: fitted(rows, kind.bits, kind.group_size, columns))


@in_eval_mode
def reading_alike(decoder: Decoder, modules: Sequence[str]) -> dict[str, str]:
    """For the matrix of each of `modules` that runs: the first that reads the same input.

    vLLM joins matrices of one input (queries, keys and values; gates and ups) into one, which has one scheme; which of
    them differs by family, so all get the same.
    """
    with calls_noted((name, decoder.model.get_submodule(name)) for name in modules) as calls:
        uncached_logits(decoder.model, sample_inputs(decoder, None)[0][:, :TOKENS])
    first: dict[tuple[int, int], str] = {}  # the calls hold their inputs, so no memory is used twice
    return {
        f"{call.path}.weight": first.setdefault((call.given.data_ptr(), call.given.numel()), f"{call.path}.weight")
        for call in calls
    }
