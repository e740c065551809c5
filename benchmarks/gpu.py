"""On a GPU, random weights in bfloat16: profile, kl, a sweep, the gate and decoding after removal, over plain forwards.

The gate writes and reads a checkpoint, so it is held against that too: a bare save_pretrained and from_pretrained.

`python benchmarks/gpu.py` takes Llamas of 1B and of 7B parameters (32 GB of the GPU's memory: a model, its pruned copy
and what the gate reloads) and writes gpu.json beside this file. Its limits are guesses from the CPU's, until it has run
once. `--device cpu --size tiny` tries it where there is no GPU, and keeps nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from results import Benchmark
from run import interleaved
from transformers import AutoConfig, AutoModelForCausalLM

import lyapunov_prune as lp
from lyapunov_prune.evaluation.speed import measure_speed
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.predictions.divergence import skip_divergence
from lyapunov_prune.sensitivity.sweep import Job, Sweep

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 4},
    "1B": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 20, "num_attention_heads": 16},
    "7B": {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
VOCABULARY, WINDOWS, CONTEXT = 32_000, 4, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, action="append", help="again for another; 1B and 7B if not given")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    on_gpu = torch.device(asked.device).type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("skipped: there is no GPU here; --device cpu --size tiny tries the command")
        return
    found = Benchmark("gpu")
    for size in asked.size or ("1B", "7B"):
        measure(found, size, asked.device)
    if on_gpu:
        found.save()


@torch.no_grad()
def measure(found: Benchmark, size: str, device: str) -> None:
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, **SIZES[size], dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(VOCABULARY, (WINDOWS, CONTEXT), generator=torch.Generator().manual_seed(0))
    layers = find_structure(model).num_layers
    removed = range(layers // 2, layers // 2 + layers // 4)
    pruned = lp.remove_layers(model, removed)

    def synchronised(job: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            job()
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)  # kernels are queued, not done, when a call returns

        return run

    def plain() -> None:
        for row in ids:
            model(row[None].to(device), use_cache=False)

    def sweep() -> None:
        Sweep(model, ids).run([Job(f"{layer}", layer, remove=(layer,)) for layer in range(layers)])

    def written() -> None:
        """What the gate does to the disk."""
        with tempfile.TemporaryDirectory() as folder:
            pruned.save_pretrained(folder)
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    jobs: dict[str, Callable[[], object]] = {
        "plain": plain,
        "contraction": lambda: lp.measure_contraction(model, ids, seeds=(0,)),
        "kl": lambda: skip_divergence(model, ids),
        "sweep": sweep,
        "written": written,
        "gate": lambda: lp.verify_removal(model, pruned, removed),
    }
    seconds = interleaved({name: synchronised(job) for name, job in jobs.items()})
    plainly = seconds["plain"]
    of = f", {size}"
    found.add(
        f"`measure_contraction`, one seed{of}: time", "two plain forwards", seconds["contraction"] / 2 / plainly, 1.15
    )
    found.add(f"`rank --criterion kl`{of}: time", "L/2 plain forwards", seconds["kl"] / (layers / 2) / plainly, 1.3)
    found.add(f"sweep, one layer removed{of}: time", "as many plain forwards", seconds["sweep"] / layers / plainly, 0.6)
    found.add(
        f"gate of {len(removed)} of {layers} layers{of}: time",
        "saved, loaded, ten plain forwards",
        seconds["gate"] / (seconds["written"] + 10 * plainly),
        1.0,
    )
    speed = measure_speed({"dense": model, "pruned": pruned}, prompt=64, steps=48)
    dense, row = speed.rows
    kept = row.parameters / dense.parameters
    what = f"time per token, {len(removed)} of {layers} layers removed{of}"
    found.add(what, "dense time × kept parameters", dense.decode / row.decode / kept, 1.10)


if __name__ == "__main__":
    main()
