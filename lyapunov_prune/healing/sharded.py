"""Layers in parts: of every matrix a process holds its share, and a layer is whole only while it runs.

The parts are torch's (`fully_shard`, FSDP2): a layer is gathered before it runs, forwards and backwards, and the
gradients are averaged over the processes as each takes its share of them. What stands outside the layers is not
trained, and stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, broadcast_object_list
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.healing.trained import beside
from lyapunov_prune.models.launched import processes
from lyapunov_prune.models.structure import find_layers


def sharing(per_step: int, rank: int | None) -> PartialState:
    """The processes that share layers out: their parts are on GPUs, if there are any.

    Raises LyapunovPruneError for one process, for a number of windows a step that is no multiple of theirs, and for a
    `rank`.
    """
    if rank is not None:
        raise LyapunovPruneError("updates of low rank are small, and are not shared out; give --update-rank or --shard")
    found = processes(on_cpu=not torch.cuda.is_available())
    count = found.num_processes
    if count == 1:
        raise LyapunovPruneError("one process has nobody to share layers with; start several by accelerate launch")
    if per_step % count:
        raise LyapunovPruneError(
            f"of {per_step} windows a step {count} processes take unequal numbers, and all gather layers as often; "
            f"give a multiple of {count} (--per-step)"
        )
    return found


def require_shardable(model: PreTrainedModel, called: str) -> None:
    """Raise LyapunovPruneError for a model whose layers cannot be shared out; the line says what is `called` so."""
    if model.device.type != "cpu":
        raise LyapunovPruneError(f"{called} is on {model.device} as a whole; load it on the CPU (--device cpu)")
    seen: set[int] = set()
    for layer in find_layers(model).layers:
        mine = {id(p) for p in layer.parameters()}
        if mine & seen:
            raise LyapunovPruneError(
                f"layers of {called} share weights, which are not healed in parts; heal them whole"
            )
        seen |= mine
        # A process whose windows reach an expert would wait for the gradient of one whose windows do not.
        if any(isinstance(module, nn.ModuleList) and "expert" in name for name, module in layer.named_modules()):
            raise LyapunovPruneError(f"{called} has experts in modules of their own; heal it whole, or at low rank")


def sharded(model: PreTrainedModel, among: PartialState) -> PreTrainedModel:
    """A twin of `model`, which lies on the CPU, on the device of this process: its layers in parts, all else whole."""
    twin = beside(model)
    mesh = init_device_mesh(among.device.type, (among.num_processes,))
    layers = list(find_layers(twin).layers)
    inside = {module for layer in layers for module in layer.modules()}
    for module in twin.modules():
        if module not in inside:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(among.device)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # each is a root, which would stay whole
    return twin


@torch.no_grad()
def gathered_into(whole: PreTrainedModel, parts: PreTrainedModel) -> PreTrainedModel:
    """`whole`, with the numbers of `parts`, a `sharded` model like it; every process asks at once."""
    layers = find_layers(whole).layers
    for name, part in find_layers(parts).layers.named_parameters():
        layers.get_parameter(name).copy_(gathered(part))
    return whole


@torch.no_grad()
def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that is in parts, on the CPU, in every process; others as they are."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def of_main(tensors: Mapping[str, torch.Tensor], among: PartialState) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and numbers of the `tensors` that the main process holds, in every process, on its device.

    Others give none, and are sent one tensor after the other: none holds all.
    """
    if among.num_processes == 1:
        yield from tensors.items()
        return
    (heads,) = broadcast_object_list([{name: (t.shape, t.dtype) for name, t in tensors.items()}])
    for name, (shape, dtype) in heads.items():
        sent = tensors[name] if among.is_main_process else torch.empty(shape, dtype=dtype)
        yield name, broadcast(sent.to(among.device))


def in_parts_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor in the parts that `like` is in and on its device; one of another shape stays whole."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value.to(like.device)
    return distribute_tensor(value.to(like.device_mesh.device_type), like.device_mesh, like.placements)


def are_sharded(parameters: Mapping[str, nn.Parameter]) -> bool:
    return any(isinstance(p, DTensor) for p in parameters.values())
