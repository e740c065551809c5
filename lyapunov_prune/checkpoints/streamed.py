"""Models larger than memory: the weights of one layer at a time are read from the files.

The rest (embeddings, norms, the head) is in memory; `layer_stream` reads the layers. Before a model is returned, a run
on a few tokens tests that a layer needs only the arguments that it is given there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from lyapunov_prune.arguments import checked
from lyapunov_prune.checkpoints.layer_stream import LayerStream, read_tensor
from lyapunov_prune.checkpoints.outline import Outline, read_outline
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.device import kernels, require_memory, resolve_device
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.loading import checkpoint_folder, known_dtype
from lyapunov_prune.models.rebuilt import take_over
from lyapunov_prune.models.streamed import keep_stream
from lyapunov_prune.models.structure import find_structure, require_causal
from lyapunov_prune.progress import status


@checked
def load_streamed(
    name: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    offline: bool = False,
    text_only: bool = False,
) -> Decoder:
    """`load` for a model that need not fit in memory: a folder or hub id with safetensors, read one layer at a time.

    It works with measurements that use states: `measure_contraction`, `block_influence`, `perplexity`, `explain` (of
    two streamed models), and `rank` by rho, bi, blend, angular and kl of layers, by bi of sublayers, and by from-end
    and random of both. All windows go through the layers together, and their states are in memory.
    `export.compress_on_disk` writes the model compressed, `budget.spend` a GGUF file or a folder of a size. Everything
    else that changes weights, or runs the model once per layer, refuses it.

    Raises LyapunovPruneError as `load` does, and for a model without safetensors files (GGUF, adapters), for a decoder
    that has to be run in memory to be judged (docs/families.md), for one whose layers share more than the state passed
    from one to the next, and if embeddings, head and one layer do not fit in memory.
    """
    wanted, name = known_dtype(dtype), str(name)
    if name.endswith(".gguf"):
        raise LyapunovPruneError(f"{name} is no safetensors file, and only those are streamed; load it whole")
    place = resolve_device(str(device))
    outline = read_outline(checkpoint_folder(name, offline=offline), name, wanted, text_only=text_only)
    model, stream = _made(outline, place)
    with status("trying whether the layers can be read one at a time"), stream.trial():
        require_causal(model)
    return wrap(model, outline.decoder.tokenizer)


def streamed(outline: Outline) -> Decoder:
    """The decoder of `outline`, streamed on the CPU; it is not tested, so batches are not split."""
    model, stream = _made(outline, "cpu")
    stream.splits = False
    return wrap(model)


def refilled(decoder: Decoder, fill: Callable[[torch.Tensor, str], bool], dtype: torch.dtype | None = None) -> Decoder:
    """Another model of the files of the streamed `decoder`, on its device, and in `dtype` if that is given.

    `fill` is called with the memory and the name of each tensor that is to be read, of a layer at every time. It may
    put other numbers there and return True; otherwise the files are read. The model has no digests.
    """
    before = decoder.stream
    assert isinstance(before, LayerStream)
    model, stream = _made(_Refilled(before.outline, fill, dtype), str(decoder.model.device))
    stream.like(before)
    return wrap(model, decoder.tokenizer)


class _Refilled(Outline):
    def __init__(self, outline: Outline, fill: Callable[[torch.Tensor, str], bool], dtype: torch.dtype | None) -> None:
        vars(self).update(vars(outline))
        self._other = fill
        if dtype is not None:
            model: Any = copy.deepcopy(outline.model)
            self.decoder = Decoder(model.to(dtype), find_structure(model))

    def fill(self, memory: torch.Tensor, name: str) -> None:
        if not self._other(memory, name):
            super().fill(memory, name)


def _made(outline: Outline, device: str) -> tuple[PreTrainedModel, LayerStream]:
    from accelerate import init_empty_weights

    wanted = outline.model.state_dict(keep_vars=True)
    _require_memory(outline, wanted, device)
    config = copy.deepcopy(outline.model.config)
    with quiet(), init_empty_weights(include_buffers=False), no_init_weights():
        model: Any = type(outline.model)._from_config(config, dtype=outline.model.dtype, **kernels(config))
    model.tie_weights()
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()  # only buffers, which no checkpoint holds: outside the weights' dtype, as loading does
    structure = find_structure(model.eval())
    made: dict[int, torch.Tensor] = {}
    for name, meant in wanted.items():
        if structure.layer_of(name) is not None:
            _put(model, name, meant)
            continue
        if id(meant) not in made:
            made[id(meant)] = read_tensor(outline, name, meant, device)
        _put(model, name, made[id(meant)])
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:  # buffers of layers are read with them
                module._buffers[key] = buffer.to(device)
    take_over(outline.model, model)
    stream = LayerStream(outline, model, structure, device)
    keep_stream(model, stream)
    return model, stream


def _require_memory(outline: Outline, wanted: dict[str, Any], device: str) -> None:
    sizes: dict[int | None, int] = {None: 0}
    for name, tensor in {id(t): (n, t) for n, t in wanted.items()}.values():
        layer = outline.decoder.structure.layer_of(name)
        sizes[layer] = sizes.get(layer, 0) + tensor.numel() * tensor.itemsize
    outside = sizes.pop(None)
    require_memory(outside + max(sizes.values(), default=0), device, "embeddings, head and the largest layer")


def _put(root: nn.Module, name: str, tensor: Any) -> None:
    path, _, key = name.rpartition(".")
    module = root.get_submodule(path)
    (module._parameters if key in module._parameters else module._buffers)[key] = tensor
