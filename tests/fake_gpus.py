"""GPUs that are none: tensors of the CPU that say they are on `cuda:0` or `cuda:1`, and are refused beside others.

What Python calls is seen, not the operators that torch calls inside of it. The numbers are those of the CPU.
"""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from lyapunov_prune.models.structure import find_structure

CPU = torch.device("cpu")
# What may be given tensors of several devices: it moves them, or asks for their shapes and dtypes alone.
_FREE = {"to", "copy_", "type_as", "view_as", "reshape_as", "expand_as", "_has_compatible_shallow_copy_type", "__set__"}
_LISTS = {"cat", "stack"}  # where a scalar of the CPU is no exception
_GPU = {"is_cuda": True, "is_cpu": False}


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says it is on the device `at`."""

    at: torch.device

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:  # accelerate makes parameters by class
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            twin = self.detach().clone()
            memo[id(self)] = nn.Parameter(twin, self.requires_grad) if isinstance(self, nn.Parameter) else twin
        return memo[id(self)]


class FakeGPUs(TorchFunctionMode):
    """Inside the block `cuda:0` and `cuda:1` are devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})


def _at(tensor: torch.Tensor) -> torch.device:
    return vars(tensor).get("at", CPU) if isinstance(tensor, OnGPU) else CPU


def _put(tensor: torch.Tensor, at: torch.device) -> torch.Tensor:
    if at.type != "cuda":
        return tensor.as_subclass(torch.Tensor) if isinstance(tensor, OnGPU) else tensor
    moved = tensor.as_subclass(OnGPU)
    moved.at = torch.device("cuda", at.index or 0)
    return moved


def _asked(name: str, args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a call names."""
    if name in ("cpu", "cuda"):
        return torch.device(name)
    named = [kwargs.get("device"), *(args[1:2] if name == "to" else ())]
    for each in [*named, kwargs.get("other")]:
        if isinstance(each, torch.Tensor):
            return _at(each)
        if isinstance(each, torch.device | str | int) and not isinstance(each, bool):
            return torch.device(each)
    return None


def _require_together(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError for tensors on several devices, as torch would."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if name in _FREE or not tensors:
        return
    if name in ("__getitem__", "__setitem__"):  # by indices of the CPU too; what is put into a slice is copied
        index = [x for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
        value = [x for x in args[2:] if index and isinstance(x, torch.Tensor) and x.ndim]
        places = {_at(args[0]), *map(_at, value), *(_at(x) for x in index if _at(x) != CPU)}
    else:
        places = {_at(x) for x in tensors if name in _LISTS or x.ndim or _at(x) != CPU}
    if len(places) > 1:
        raise RuntimeError(f"{name}: all tensors must be on one device, and are on {', '.join(map(str, places))}")


def _called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        name = getattr(func, "__name__", "")
        if func is torch.device or name == "_parse_to":
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        of = next((at for x in tensors if (at := _at(x)) != CPU), CPU)
        if name == "__get__" and of != CPU:
            attribute = func.__self__.__name__
            if attribute == "device" or attribute in _GPU:
                return of if attribute == "device" else _GPU[attribute]
        if name == "_has_compatible_shallow_copy_type" and _at(args[0]) != _at(args[1]):
            return False  # so that a module gets another parameter
        if name in ("numpy", "__array__") and of != CPU:
            raise TypeError(f"can't convert {of} device type tensor to numpy")
        _require_together(name, args, kwargs)
        asked = _asked(name, args, kwargs)
        if asked is not None and asked.type == "cuda" and any(map(_of_cpu, kwargs.values())):
            raise RuntimeError(f"{name}: expected a 'cuda' device type for generator but found 'cpu'")
        at = asked or (_at(args[0]) if name in _FREE else of)

        def real(x: Any) -> Any:
            named = isinstance(x, torch.device) or (isinstance(x, str) and x.startswith("cuda"))
            return CPU if named and torch.device(x).type == "cuda" else x

        moved = name in ("to", "cpu", "cuda") and at != _at(args[0])
        if name == "cuda":
            args, kwargs = args[:1], {}
        found = func(*tree_map(real, args), **tree_map(real, kwargs))
        if moved and at.type != "meta" and found.data_ptr() == args[0].data_ptr():
            found = found.clone()  # there it would be another tensor
        given = set(map(id, tensors))

        def out(x: Any) -> Any:
            keeps = not isinstance(x, torch.Tensor) or (id(x) in given and not moved)
            return x if keeps else _put(x, at)

        return tree_map(out, found)


def _of_cpu(x: Any) -> bool:
    return isinstance(x, torch.Generator) and x.device == CPU


def spread(model: PreTrainedModel, split: int) -> PreTrainedModel:
    """`model` with the layers before `split` and what stands before them on `cuda:0`, the rest on `cuda:1`."""
    structure = find_structure(model)
    places: dict[str, str] = {}
    for name, module in model.named_modules():
        layer = name.removeprefix(f"{structure.layers_path}.") if name.startswith(f"{structure.layers_path}.") else ""
        if layer.isdigit():
            places[name] = f"cuda:{int(int(layer) >= split)}"
        elif name and not layer and not any(module.children()):
            places[name] = f"cuda:{int('embed' not in name and 'rotary' not in name)}"
    for name, place in places.items():
        model.get_submodule(name).to(place)
    spread: Any = accelerate.dispatch_model(model, places, force_hooks=True)
    return spread
