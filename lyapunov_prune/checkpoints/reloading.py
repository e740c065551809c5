"""Whether a saved model reloads with the same keys, settings and logits in plain transformers, without this package.

`reload_check` loads it here. `elsewhere_check` loads a checkpoint with its own module in another process, which cannot
import this package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lyapunov_prune.errors import CheckFailed
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import SAME_LIMIT, deviation, uncached_logits
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.device import kernels
from lyapunov_prune.models.dispatched import placement
from lyapunov_prune.models.families import POSITION_ATTRIBUTES
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.kinds import plain_attributes
from lyapunov_prune.models.pictures import picture_logits, picture_prompt
from lyapunov_prune.models.quantised import is_known, quantisation, reader_of, unpacking
from lyapunov_prune.models.readers.compressed_tensors import unlogged
from lyapunov_prune.models.sharing import share_equal
from lyapunov_prune.models.structure import Structure, backbone_of
from lyapunov_prune.models.wrappers import auto_class, loading_class

RELOADED = "reloads as saved"


@dataclass(frozen=True)
class GateCheck:
    name: str
    passed: bool
    measured: float
    limit: float
    detail: str

    def require_passed(self, what: str, remedy: str) -> None:
        """Raise CheckFailed, which says `what` is wrong with the files, unless the check passed."""
        if not self.passed:
            raise CheckFailed(f"nothing written: {what}: {self.detail}; {remedy}")


def reload_check(
    decoder: Decoder,
    folder: Path,
    inputs: list[torch.Tensor],
    changed: Callable[[PreTrainedModel], str | None] = lambda reloaded: None,
    logits: Callable[[], KeptLogits] | None = None,
) -> GateCheck:
    """Compare the model of `decoder` with what plain `from_pretrained` loads from `folder`, on `inputs`.

    `logits` gives the logits of `decoder` on `inputs` if they are known. `changed` returns what else is wrong with the
    reloaded model after its forwards, or None. Weights that are equal share their memory, so a device never holds them
    twice.
    """
    pruned = decoder.model
    place, plain = placement(pruned), not quantisation(pruned.config)
    if plain and not isinstance(place, dict):
        place = "cpu"  # only what differs is moved to the device
    with quiet():
        loaded: Any = loading_class(pruned).from_pretrained(
            folder,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            dtype=pruned.dtype,
            device_map=place,
            **kernels(pruned.config),
        )
    reloaded, info = loaded
    reloaded.eval()
    limit = SAME_LIMIT[pruned.dtype]
    broken = _wrong_keys(info)
    if not broken:
        again = Decoder(reloaded, _structure_like(reloaded, decoder.structure))
        broken = changed_setting(decoder.layers, again.layers)
    if broken:
        return GateCheck(RELOADED, False, float("inf"), limit, broken)
    if plain:
        share_equal(reloaded, dict(pruned.named_parameters(remove_duplicate=False)))
    if place == "cpu":
        reloaded.to(pruned.device)
    _share_rounded_tables(pruned, reloaded)
    with quiet():  # the first forward of packed weights shows a progress bar
        kept = KeptLogits(again, inputs)
        wanted = KeptLogits(decoder, inputs) if logits is None else logits()
    worst = kept.deviation(wanted)
    if (prompt := picture_prompt(pruned)) is not None:
        worst = max(worst, deviation(picture_logits(reloaded, prompt), picture_logits(pruned, prompt)))
    wrong = changed(reloaded)
    if wrong:
        return GateCheck(RELOADED, False, worst, limit, wrong)
    return GateCheck(RELOADED, worst <= limit, worst, limit, "logits after plain from_pretrained")


def wrong_packed_keys(folder: Path, config: PreTrainedConfig) -> str | None:
    """What is wrong with the keys of a packed model's tensors in `folder`, or None.

    They are checked on the `meta` device, by a reader if transformers does not know the method. `config` is that of
    `folder`; plain weights are not checked.
    """
    if not quantisation(config):
        return None
    options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
    with quiet(), unlogged(), unpacking(None if is_known(config) else reader_of(config)):
        loaded: Any = auto_class(config).from_pretrained(
            folder, device_map="meta", ignore_mismatched_sizes=True, **options
        )
    info = loaded[1]
    # on `meta` compressed-tensors packs the integers of a matrix and not its zero points
    mismatched = [key for key in info["mismatched_keys"] if not key[0].endswith(".weight_zero_point")]
    return _wrong_keys({**info, "mismatched_keys": mismatched})


def _structure_like(model: PreTrainedModel, structure: Structure) -> Structure:
    """`structure` in another model of its class; a list as long may stand in its vision tower."""
    path = structure.layers_path
    config = model.config.get_text_config(decoder=True)
    layers: Any = model.get_submodule(path)
    return replace(structure, backbone=backbone_of(model, path), layers=layers, config=config)


def _wrong_keys(info: Mapping[str, Any]) -> str | None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            keys = sorted(map(str, info[kind]))
            return f"{len(keys)} {kind.replace('_', ' ')} on reloading, first {keys[0]}"
    return None


def changed_setting(layers: nn.ModuleList, again: nn.ModuleList, within: float = 1e-12) -> str | None:
    """The first plain attribute that differs between `layers` and the reloaded ones, `again`; or None.

    Floats may differ by a relative `within`. Catches what short inputs cannot: a layer that comes back with another
    window, scale or kind.
    """
    for index, (a, b) in enumerate(zip(layers, again, strict=True)):
        for (name, before), (_, after) in zip(a.named_modules(), b.named_modules(), strict=True):
            settings = plain_attributes(after)
            for key, value in plain_attributes(before).items():
                other = settings.get(key)
                floats = isinstance(value, float) and isinstance(other, float)
                if other != value and not (floats and abs(value - other) <= within * abs(value)):
                    return f"layer {index} came back with {name + '.' if name else ''}{key} = {other!r}, not {value!r}"
            for key in POSITION_ATTRIBUTES:
                if getattr(before, key, None) != getattr(after, key, None):
                    return (
                        f"layer {index} holds {key} {getattr(before, key)}, and {getattr(after, key)} after reloading"
                    )
    return None


def _share_rounded_tables(pruned: PreTrainedModel, reloaded: PreTrainedModel) -> None:
    """Let `reloaded` use the rotary tables of `pruned` if they agree up to rounding.

    `model.bfloat16()` rounds these tables, which no checkpoint holds, while `from_pretrained` keeps them in float32.
    That difference is not caused by the removal.
    """
    for name, module in pruned.named_modules():
        other = reloaded.get_submodule(name)
        for key in module._non_persistent_buffers_set & other._non_persistent_buffers_set:
            a, b = module._buffers[key], other._buffers[key]
            if a is None or b is None or a.shape != b.shape or not a.is_floating_point():
                continue
            if torch.allclose(lift(a), lift(b), rtol=max(1e-6, torch.finfo(a.dtype).eps), atol=0):
                other._buffers[key] = a


ELSEWHERE = "reloads without this package"
# The program of that process. Its inputs and results are files in the folder given as its argument.
_PROGRAM = """
import json, sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lyapunov_prune":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch, transformers
from safetensors.torch import load_file, save_file

here = Path(sys.argv[1])
asked = json.loads((here / "asked.json").read_text())
torch.set_num_threads(asked["threads"])
model, info = getattr(transformers, asked["loader"]).from_pretrained(
    asked["folder"], trust_remote_code=True, local_files_only=True, output_loading_info=True,
    dtype=getattr(torch, asked["dtype"]), device_map=asked["device"], **asked["kernels"],
)
model.eval()
keys = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
logits = {}
with torch.no_grad():
    for name, x in load_file(here / "inputs").items():
        x = x.to(model.device)
        logits[name] = (model(x) if x.is_floating_point() else model(x, use_cache=False)).logits.cpu().contiguous()
save_file(logits, here / "logits")
(here / "keys.json").write_text(json.dumps(keys))
"""


@torch.no_grad()
def elsewhere_check(model: PreTrainedModel, folder: Path, inputs: list[torch.Tensor]) -> GateCheck:
    """Compare `model` with what transformers loads from `folder` in a process without this package.

    It loads with `trust_remote_code=True`, runs the module in the folder, and must find exactly the expected keys. The
    model is placed as `model` is, by its device map.
    """
    limit = SAME_LIMIT[model.dtype]
    with tempfile.TemporaryDirectory(prefix="lyapunov-prune-gate-") as place:
        here = Path(place)
        save_file({str(i): x.cpu() for i, x in enumerate(inputs)}, here / "inputs")
        asked = {
            "folder": str(folder.resolve()),
            "loader": loading_class(model).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": placement(model),
            "kernels": kernels(model.config),
            "threads": torch.get_num_threads(),
        }
        (here / "asked.json").write_text(json.dumps(asked, default=str), encoding="utf-8")
        torch.cuda.empty_cache()  # free torch's cached memory for the other process
        # transformers copies checkpoint modules to a cache; use a temporary one, since these may be rejected.
        quiet = {"HF_MODULES_CACHE": str(here / "modules"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, place],
            env=os.environ | quiet,
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return GateCheck(ELSEWHERE, False, float("inf"), limit, f"transformers alone does not load it: {last}")
        for kind, keys in json.loads((here / "keys.json").read_text(encoding="utf-8")).items():
            if keys:
                detail = f"{len(keys)} {kind.replace('_', ' ')} without this package, first {keys[0]}"
                return GateCheck(ELSEWHERE, False, float("inf"), limit, detail)
        logits = load_file(here / "logits")
    found = (deviation(logits[str(i)], uncached_logits(model, x).cpu()) for i, x in enumerate(inputs))
    worst = max(found)
    return GateCheck(ELSEWHERE, worst <= limit, worst, limit, "logits in a process without this package")
