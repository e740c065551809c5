"""Ratios of time and memory on the built-in model, measured side by side in one run: `make bench`.

Writes run.json beside this file.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from results import Benchmark

import lyapunov_prune as lp
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.evaluation.speed import measure_speed
from lyapunov_prune.export import Cuts, make_compact
from lyapunov_prune.forward.decoding import continued
from lyapunov_prune.forward.reading import read
from lyapunov_prune.merging.merge import merge_layers
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.sensitivity.sweep import Job, Sweep

TOKENS, CONTEXT, REPEATS = 2048, 512, 3
PROMPT, STEPS = 128, 32
REMOVED = (2, 4, 8)
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # of a child: else glibc keeps what is freed, as devices' allocators do not
CUT = ((8, 0), (0, 8), (4, 4), (8, 8))  # attentions and activations, of a compact model


def main() -> None:
    if len(sys.argv) == 2:  # a child process: do one job and report its peak memory
        print(peak_of(sys.argv[1]))
        return
    torch.manual_seed(0)
    loaded = lp.load("smollm2-135m")
    batch = lp.load_text("builtin", loaded.tokenizer, tokens=TOKENS, context=CONTEXT)
    model = loaded.model

    def plain() -> None:
        with torch.no_grad():
            for row in batch.ids:
                model(row[None], use_cache=False)

    def calibrate() -> None:
        stream(model, batch, find_projections(wrap(model)), "norms", lambda here, found: None)

    seconds = interleaved(
        {
            "plain": plain,
            "contraction": lambda: lp.measure_contraction(model, batch, seeds=(0,)),
            "influence": lambda: lp.block_influence(model, batch),
            "calibration": calibrate,
        }
    )
    found = Benchmark("run")
    plainly = seconds["plain"]
    found.add("`measure_contraction`, one seed: time", "two plain forwards", seconds["contraction"] / 2 / plainly, 1.15)
    memory = peak("contraction") / peak("plain")
    found.add("the same: peak memory above the model's", "a plain forward of batch 2", memory, 1.10)
    found.add("`block_influence`: time", "one plain forward", seconds["influence"] / plainly, 1.10)
    found.add("calibration layer by layer (`norms`): time", "one plain forward", seconds["calibration"] / plainly, 3.0)

    sweeps(found)
    probe(found)

    merged = {m.block.layer: (m.weight, m.bias) for m in merge_layers(model, batch, range(12, 20), "mean-gate")}
    models = {"dense": model}
    for count in REMOVED:
        models[f"{count} of 30 layers removed"] = lp.remove_layers(model, range(12, 12 + count))
    for attention, activation in CUT:
        cuts = Cuts(tuple(range(12, 12 + attention)), {i: merged[i] for i in range(12, 12 + activation)})
        models[f"{attention} attentions and {activation} activations removed"] = make_compact(model, cuts)
    speed = measure_speed(models, prompt=64, steps=48, repeats=REPEATS)
    for row in speed.rows[1:]:
        found.add_speed(row, speed.rows[0], 64 if "attentions" in row.model else None)
    found.save()


def sweeps(found: Benchmark) -> None:
    """A sweep that changes each of the L layers in turn, against L plain forwards that form their logits."""
    loaded = lp.load("smollm2-135m")
    batch = lp.load_text("builtin", loaded.tokenizer, tokens=1024, context=512)
    model, layers = loaded.model, range(loaded.structure.num_layers)
    weights = {p: p.weight(model).clone() for p in find_projections(wrap(model))}

    def of_layer(layer: int) -> dict[Projection, torch.Tensor]:
        return {p: W for p, W in weights.items() if p.layer == layer}

    def plain() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            for row in batch.ids:
                model(row[None], use_cache=False)
        return time.perf_counter() - start

    jobs = {
        "removed": [Job(f"{k}", k, remove=(k,)) for k in layers],
        "replaced": [Job(f"{k}", k, partial(of_layer, k)) for k in layers],
    }
    for what, changes in jobs.items():
        plain()
        sweep, mine, theirs = Sweep(model, batch), 0.0, 0.0
        for job in changes:  # in turns; the first pays for the dense states
            start = time.perf_counter()
            sweep.run([job])
            mine += time.perf_counter() - start
            theirs += plain()
        found.add(f"sweep, one layer {what} at a time: time", "as many plain forwards", mine / theirs, 0.60)


def probe(found: Benchmark) -> None:
    """Every layer and both of its branches dropped alone at every step, against L times the decoding of the steps."""
    loaded = lp.load("smollm2-135m")
    prompts = lp.load_text("builtin", loaded.tokenizer, tokens=PROMPT, context=PROMPT)
    seconds = interleaved(
        {
            "probe": lambda: lp.probe_layers(loaded.model, prompts, steps=STEPS),
            "decoding": lambda: continued(read(loaded, prompts), prompts.ids, STEPS),
        }
    )
    ratio = seconds["probe"] / seconds["decoding"] / loaded.structure.num_layers
    found.add("`hierarchy`, probe of all layers and branches: time", f"L × decoding of {STEPS} steps", ratio, 0.60)
    found.add("the same: peak memory above the model's", "1 GB", peak("probe") / 1e9, 1.0)


def interleaved(jobs: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Median seconds of each job over repeats in which the jobs take turns, after one turn of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(1 + repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peak(job: str) -> float:
    """Bytes above the model's that a job needs at its peak, in a fresh process."""
    return float(subprocess.run([sys.executable, __file__, job], check=True, capture_output=True, text=True).stdout)


def peak_of(job: str) -> int:
    """Peak resident memory of the job less what was resident before it (Linux)."""
    loaded = lp.load("smollm2-135m")
    batch = lp.load_text("builtin", loaded.tokenizer, tokens=TOKENS, context=CONTEXT)
    with torch.no_grad():
        loaded.model(batch.ids[:1, :8], use_cache=False)  # touches every weight: the file is mapped lazily
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    if job == "contraction":
        lp.measure_contraction(loaded.model, batch, seeds=(0,))
    elif job == "probe":
        lp.probe_layers(loaded.model, batch.ids[:1, :PROMPT], steps=STEPS)
    else:
        with torch.no_grad():
            for row in batch.ids:
                loaded.model(row.repeat(2, 1), use_cache=False)
    return status("VmHWM") - before


def status(field: str, process: int | str = "self") -> int:
    """Bytes; 0 of a process that has none any more."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next((text for text in lines if text.startswith(field)), "- 0").split()[1]) * 1024


if __name__ == "__main__":
    main()
