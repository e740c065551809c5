"""Load a checkpoint with its own module in another process, which cannot import this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.forward.logits import SAME_LIMIT, deviation, uncached_logits
from lyapunov_prune.models.device import kernels
from lyapunov_prune.models.dispatched import placement
from lyapunov_prune.models.wrappers import loading_class

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
    dtype=getattr(torch, asked["dtype"]), device_map=asked["device"], offload_folder=here / "offloaded",
    **asked["kernels"],
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
    model is placed as `model` is, by its device map. Without `inputs` it is loaded on the meta device and not run.
    """
    limit = SAME_LIMIT[model.dtype]
    with tempfile.TemporaryDirectory(prefix="lyapunov-prune-gate-") as place:
        here = Path(place)
        save_file({str(i): x.cpu() for i, x in enumerate(inputs)}, here / "inputs")
        asked = {
            "folder": str(folder.resolve()),
            "loader": loading_class(model).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": placement(model) if inputs else "meta",
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
    worst = max(found, default=0.0)
    detail = f"{'logits' if inputs else 'names and shapes'} in a process without this package"
    return GateCheck(ELSEWHERE, worst <= limit, worst, limit, detail)
