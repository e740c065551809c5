"""Throughput of `prune_on_disk` beside `cp` of the kept bytes, and its peak memory, in one run: `make bench`.

A sharded checkpoint of 3 GB is built on the spot and deleted after. Writes on_disk.json beside this file.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from results import Benchmark
from run import status
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lyapunov_prune.checkpoints.outline import Outline, read_outline
from lyapunov_prune.checkpoints.tensor_files import read_tensors
from lyapunov_prune.export.copied import prune_on_disk
from lyapunov_prune.pruning.plan import PruningPlan

SHAPES = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 5}
REMOVE, REPEATS, SHARD = (1, 3), 3, 10**9
SPARE = 500e6  # bytes of memory allowed beside the largest tensor


def main() -> None:
    if len(sys.argv) == 3:  # a child process: do it once and report its peak memory
        print(peak_of(Path(sys.argv[1]), Path(sys.argv[2])))
        return
    with tempfile.TemporaryDirectory(prefix="lyapunov-prune-bench-", dir=Path.cwd()) as place:
        source, target, kept = (Path(place) / name for name in ("source", "target", "kept"))
        build(source)
        outline = read_outline(source, source)
        prune(outline, kept)  # its files are the kept bytes
        copy = ["cp", "-r", str(kept), str(target)]
        seconds = taking_turns(
            target,
            {
                "cp": lambda: subprocess.run(copy, check=True),
                "cp and sync": lambda: copy_and_sync(copy, target),
                "prune": lambda: prune(read_outline(source, source), target),
            },
        )
        found = Benchmark("on_disk")
        found.add("`prune_on_disk`, 3 GB: time", "`cp` of the kept bytes", seconds["prune"] / seconds["cp"], 2.0)
        # What prune leaves is on the disk, whatever happens to the machine next; what cp leaves is in memory.
        ratio = seconds["prune"] / seconds["cp and sync"]
        found.add("the same: time", "`cp` of the kept bytes, and `sync` of them", ratio, 2.0)
        largest = max(tensor.size for tensor in outline.stored.values())
        command = [sys.executable, __file__, str(source), str(target)]
        peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found.add("the same: peak memory", "largest tensor + 500 MB", peak / (largest + SPARE), 1.0)
        found.save()


def build(folder: Path) -> None:
    """The shapes of a Llama, a file a tensor, and one block of random bytes again and again."""
    config = AutoConfig.for_model("llama", **SHAPES, num_attention_heads=32, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))).save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    block = np.random.default_rng(0).integers(0, 2**16, 2**20 + 7, dtype=np.uint16).view(np.int16)
    where = {}
    for number, (name, shape) in enumerate(shapes.items()):
        values = torch.from_numpy(np.resize(np.roll(block, number), shape.numel())).view(torch.bfloat16)
        where[name] = f"model-{number + 1:05}-of-{len(shapes):05}.safetensors"
        save_file({name: values.view(shape)}, folder / where[name], {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def prune(outline: Outline, target: Path) -> None:
    prune_on_disk(outline, PruningPlan.given(outline.identity, REMOVE), target, shard_bytes=SHARD)


def copy_and_sync(copy: list[str], target: Path) -> None:
    subprocess.run(copy, check=True)
    subprocess.run(["sync", *target.iterdir()], check=True)


def taking_turns(target: Path, jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each job, which writes `target` anew every time; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(1 + REPEATS):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn:
                times[name].append(time.perf_counter() - start)
            shutil.rmtree(target)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_of(source: Path, target: Path) -> int:
    """Peak resident memory, mapped files included, less what was resident before (Linux)."""
    read_tensors(source)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    prune(read_outline(source, source), target)
    return status("VmHWM") - before


if __name__ == "__main__":
    main()
