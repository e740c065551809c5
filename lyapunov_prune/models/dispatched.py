"""Models that accelerate spreads over devices, memory and disk (a device map), with their weights readable at any time.

accelerate leaves an offloaded weight on `meta`, without numbers, between forwards; code that reads or copies weights
cannot work on that. `bring_weights` puts the numbers in place: weights in memory as they are, weights on disk as memory
maps, which the system reads on access and drops when memory is short. Writes into a map stay in memory and never reach
the file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from safetensors import SafetensorError, safe_open
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.models.device import numbers_on_disk, resolve_device
from lyapunov_prune.results.files import require_disk

AUTO = "auto"  # GPUs first, then memory, then disk
Slots = dict[str, Any]  # a module's parameters or buffers, by name
# A dtype of torch that numpy lacks, and an integer of the same size.
_BY_BITS = {"bfloat16": "int16"}
_WRITING = "offloaded weights cannot be written", "name a folder that has room in TMPDIR"
# The names of dtypes in safetensors.
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class HeldHook(AlignDevicesHook):
    """Hook for a module whose weights stay in main memory and are copied to the computing device for each forward."""

    def __init__(self, before: AlignDevicesHook) -> None:
        super().__init__(
            execution_device=before.execution_device,
            io_same_device=before.io_same_device,
            place_submodules=before.place_submodules,
            skip_keys=before.skip_keys,
        )
        self._moved: list[tuple[Slots, str, torch.Tensor, torch.Tensor]] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._put_back()  # weights left there by a forward that raised
        for slots, name, _ in _slots(module, self.place_submodules):
            tensor = slots[name]
            there = tensor.detach().to(self.execution_device)
            if there.device != tensor.device:
                if isinstance(tensor, nn.Parameter):
                    there = nn.Parameter(there, requires_grad=tensor.requires_grad)
                self._moved.append((slots, name, tensor, there))
                slots[name] = there
        return super().pre_forward(module, *args, **kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._put_back()
        return super().post_forward(module, output)

    def _put_back(self) -> None:
        while self._moved:
            slots, name, tensor, there = self._moved.pop()
            if slots[name] is there:  # leave alone what somebody else has put there since
                slots[name] = tensor


def bring_weights(model: nn.Module) -> None:
    """Put every offloaded weight of `model` in its place; forwards give the same result before and after.

    Weights that are stored in another dtype than the model's are converted into a temporary file, which is deleted as
    soon as it is mapped. Raises LyapunovPruneError if a file is missing or has changed, or if the disk is full.
    """
    hooks = [(module, hook) for module in model.modules() for hook in _offloading(module)]
    if not hooks:
        return
    files = _Files()
    # Each with the tensor on `meta`, which has to live on, so that no id is reused.
    places = [
        (slots, name, slots[name], hook.weights_map, path)
        for module, hook in hooks
        for slots, name, path in _slots(module, hook.place_submodules)
        if slots[name].is_meta
    ]
    for _, _, before, weights, path in places:
        files.want(before, weights, path)
    files.require_disk()
    found: dict[int, torch.Tensor] = {}  # by id, so that tied tensors stay tied
    for slots, name, before, weights, path in places:
        if id(before) not in found:
            tensor = files.read(weights, path, before)
            own = isinstance(before, nn.Parameter)
            found[id(before)] = nn.Parameter(tensor, requires_grad=before.requires_grad) if own else tensor
        slots[name] = found[id(before)]
    for module, before in hooks:
        owner: Any = module
        if isinstance(owner._hf_hook, SequentialHook):
            owner._hf_hook.hooks = tuple(HeldHook(before) if hook is before else hook for hook in owner._hf_hook.hooks)
        else:
            owner._hf_hook = HeldHook(before)
    _tie(model)


def bring_all(model: nn.Module) -> None:
    """`bring_weights`; raises LyapunovPruneError if weights on `meta` remain."""
    bring_weights(model)
    elsewhere = [name for name, p in model.named_parameters() if p.is_meta]
    if elsewhere:
        raise LyapunovPruneError(
            f"{len(elsewhere)} weights hold no numbers ({elsewhere[0]}, …); load the model whole "
            "(lyapunov_prune.load), or prune its files: prune MODEL --device disk"
        )


def known_map(device_map: Literal["auto"] | Mapping[str, int | str]) -> str | dict[str, int | str]:
    """`device_map` as transformers takes it. Raises LyapunovPruneError for an unknown device."""
    if isinstance(device_map, str):
        return device_map
    for place in device_map.values():
        if place != "disk":
            resolve_device(f"cuda:{place}" if isinstance(place, int) else place)
    return dict(device_map)


def require_placed(model: nn.Module, device_map: Mapping[str, int | str]) -> None:
    """Raise LyapunovPruneError if `device_map` gives no place for a weight of `model`."""
    names = [name for name, _ in model.named_parameters()]
    nowhere = [name for name in names if not any(not at or f"{name}.".startswith(f"{at}.") for at in device_map)]
    if nowhere:
        raise LyapunovPruneError(
            f"the device map gives {len(nowhere)} weights no place ({nowhere[0]}, …); give a place for each module"
        )


@contextmanager
def offload_folder(device_map: object) -> Iterator[str | None]:
    """A temporary folder for weights that transformers has to convert before offloading; None for a single device."""
    if not isinstance(device_map, dict) and device_map != AUTO:
        yield None
        return
    with reported(*_WRITING):
        folder = tempfile.TemporaryDirectory(prefix="lyapunov-prune-offload-", ignore_cleanup_errors=True)
    with folder as name:
        yield name


def is_dispatched(model: nn.Module) -> bool:
    """Whether accelerate's hooks run the forwards of `model`, over one or several devices."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def placement(model: Any) -> Any:
    """The `device_map` for `from_pretrained` that puts another model where `model` is."""
    return vars(model).get("hf_device_map", model.device) if is_dispatched(model) else model.device


def place_alike(module: nn.Module, other: nn.Module) -> None:
    """Let `other` run where accelerate runs `module`, wherever its weights are."""
    hook = getattr(module, "_hf_hook", None)
    for each in hook.hooks if isinstance(hook, SequentialHook) else (hook,):
        if isinstance(each, AlignDevicesHook):
            add_hook_to_module(other, HeldHook(each), append=True)


def _offloading(module: nn.Module) -> Iterator[AlignDevicesHook]:
    hook = getattr(module, "_hf_hook", None)
    for each in hook.hooks if isinstance(hook, SequentialHook) else (hook,):
        if isinstance(each, AlignDevicesHook) and each.offload and each.weights_map is not None:
            yield each


def _slots(module: nn.Module, inside: bool) -> Iterator[tuple[Slots, str, str]]:
    """Parameters and buffers, each with its key in the hook's weights map."""
    for path, each in module.named_modules() if inside else (("", module),):
        for slots in (each._parameters, each._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    yield slots, name, f"{path}.{name}" if path else name


def _tie(model: Any) -> None:
    """accelerate loads a tied tensor once per name from disk; share it again if both are on the same device."""
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        (to, name), (of, key) = (_owner(model, path) for path in (target, source))
        mine, theirs = to._parameters.get(name), of._parameters.get(key)
        if mine is not None and theirs is not None and mine.device == theirs.device:
            to._parameters[name] = theirs


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    module, _, name = path.rpartition(".")
    return model.get_submodule(module), name


def _read(key: str) -> AbstractContextManager[None]:
    """Report a missing or truncated file of an offloaded weight as LyapunovPruneError."""
    failures = OSError, SafetensorError, KeyError, ValueError
    remedy = "its file was removed or changed; load the model again"
    return reported(f"the offloaded weight {key} cannot be read", remedy, *failures)


class _Files:
    """Tensors from accelerate's weight maps; opens each file once."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}
        self._needed: dict[tuple[str, str], int] = {}  # bytes of each tensor that needs conversion

    def want(self, meant: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> None:
        """Count the bytes that `read` will have to write for this tensor."""
        loader, key = _unwrapped(weights, name)
        info = _entry(loader, key)
        if info is not None and info.get("safetensors_file"):
            with _read(key):
                stored = self._file(info).get_slice(info.get("weight_name", key)).get_dtype()
            if stored != _NAMES.get(meant.dtype):
                self._needed[info["safetensors_file"], info.get("weight_name", key)] = meant.numel() * meant.itemsize

    def require_disk(self) -> None:
        if needed := sum(self._needed.values()):
            what = "the weights on disk in another dtype"
            require_disk(tempfile.gettempdir(), needed, what, "leave out the dtype, or name another place in TMPDIR")

    def read(self, weights: Mapping[str, torch.Tensor], name: str, meant: torch.Tensor) -> torch.Tensor:
        loader, key = _unwrapped(weights, name)
        info = _entry(loader, key)
        with _read(key):
            if info is None:
                tensor = loader[key]
            elif info.get("safetensors_file"):
                tensor = self._file(info).get_tensor(info.get("weight_name", key))
            else:
                tensor = _mapped(Path(loader.save_folder) / f"{key}.dat", info)  # type: ignore[attr-defined]
        if tensor.shape != meant.shape:
            raise LyapunovPruneError(f"the offloaded weight {key} has another shape; load the model again")
        if tensor.dtype == meant.dtype:
            return tensor
        if info is None:
            return tensor.to(meant.dtype)
        with reported(*_WRITING):  # into an unnamed temporary file that is freed with the tensor
            numbers = numbers_on_disk(tensor.numel(), meant.dtype)
        return numbers.copy_(tensor.reshape(-1)).view(tensor.shape)

    def _file(self, info: Mapping[str, Any]) -> Any:
        file = str(info["safetensors_file"])
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


def _unwrapped(weights: Mapping[str, torch.Tensor], name: str) -> tuple[Mapping[str, torch.Tensor], str]:
    while isinstance(weights, PrefixedDataset):
        name, weights = f"{weights.prefix}{name}", weights.dataset
    return weights, name


def _entry(loader: Mapping[str, torch.Tensor], key: str) -> Mapping[str, Any] | None:
    """The entry of a tensor on disk in accelerate's index; None for one in memory."""
    if not isinstance(loader, OffloadedWeightsLoader) or key in loader.state_dict:
        return None
    with _read(key):
        return loader.index[key]


def _mapped(file: Path, info: Mapping[str, Any]) -> torch.Tensor:
    shape, dtype = tuple(info["shape"]), info["dtype"]
    numbers = np.memmap(file, dtype=_BY_BITS.get(dtype, dtype), mode="c", shape=shape or (1,))
    tensor = torch.from_numpy(numbers)
    return (tensor if shape else tensor[0]).view(getattr(torch, dtype))
