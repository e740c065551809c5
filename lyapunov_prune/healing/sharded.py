"""Sharded layers: every process holds a share of each matrix, and a layer is whole only while it runs.

Uses torch's `fully_shard` (FSDP2): a layer is gathered before its forward and its backward pass, and gradients are
averaged over the processes and sharded. Parameters outside the layers are not trained and stay whole.
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

from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.healing.trained import beside
from lyapunov_prune.models.launched import processes
from lyapunov_prune.models.structure import find_layers


def sharing(per_step: int, rank: int | None) -> PartialState:
    """The processes that share the layers, on GPUs if there are any.

    Raises LyapunovPruneError for a single process, for a number of windows per step that is not a multiple of the
    number of processes, and for a `rank`.
    """
    found = processes(on_cpu=not torch.cuda.is_available())
    count = found.num_processes
    wrong = {
        "low-rank updates are small and are not sharded; give --update-rank or --shard": rank is not None,
        "sharding needs several processes; start them with accelerate launch": count == 1,
        f"{per_step} windows per step cannot be split evenly over {count} processes; give a multiple of {count} "
        "(per_step)": per_step % count != 0,
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(why)
    return found


def require_shardable(model: PreTrainedModel, called: str) -> None:
    """Raise LyapunovPruneError for a model whose layers cannot be sharded; the message calls it `called`."""
    layers = find_layers(model).layers
    weights = [p for layer in layers for p in layer.parameters()]
    named = [(name, module) for layer in layers for name, module in layer.named_modules()]
    wrong = {
        f"is on {model.device} as a whole; load it on the CPU (--device cpu)": model.device.type != "cpu",
        "has layers that share weights; heal without --shard": len(set(weights)) < len(weights),
        # A process that uses an expert would wait forever for one that does not.
        "has experts in separate modules; heal without --shard, or with --update-rank": any(
            isinstance(module, nn.ModuleList) and "expert" in name for name, module in named
        ),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"{called} {why}")


def sharded(model: PreTrainedModel, among: PartialState) -> PreTrainedModel:
    """A copy of `model` (on the CPU) on the device of this process, its layers sharded and the rest whole."""
    twin = beside(model)
    mesh = init_device_mesh(among.device.type, (among.num_processes,))
    layers = list(find_layers(twin).layers)
    inside = {module for layer in layers for module in layer.modules()}
    for module in twin.modules():
        if module not in inside:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(among.device)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # roots stay whole by default
    return twin


@torch.no_grad()
def gathered_into(whole: PreTrainedModel, parts: PreTrainedModel) -> PreTrainedModel:
    """Fill `whole` with the numbers of `parts`, a `sharded` model of the same kind; all processes call it together."""
    layers = find_layers(whole).layers
    for name, part in find_layers(parts).layers.named_parameters():
        layers.get_parameter(name).copy_(gathered(part))
    return whole


@torch.no_grad()
def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor as a whole one on the CPU, in every process; other tensors unchanged."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def of_main(tensors: Mapping[str, torch.Tensor], among: PartialState) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of the `tensors` of the main process, in every process, on its device.

    Other processes pass none and receive one tensor at a time, so that no process holds all of them.
    """
    if among.num_processes == 1:
        yield from tensors.items()
        return
    (heads,) = broadcast_object_list([{name: (t.shape, t.dtype) for name, t in tensors.items()}])
    for name, (shape, dtype) in heads.items():
        sent = tensors[name] if among.is_main_process else torch.empty(shape, dtype=dtype)
        yield name, broadcast(sent.to(among.device))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of this process; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_parts_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a whole tensor like `like`, on its device; a tensor of another shape stays whole."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value.to(like.device)
    return distribute_tensor(value.to(like.device_mesh.device_type), like.device_mesh, like.placements)


def are_sharded(parameters: Mapping[str, nn.Parameter]) -> bool:
    return any(isinstance(p, DTensor) for p in parameters.values())
