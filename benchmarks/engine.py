"""The speed of GGUF files in llama.cpp, before and after a run of layers is removed.

Run as `python benchmarks/engine.py FILE.gguf=FIRST-LAST...`, the layers of each file that go. It works in the current
folder, deletes what it wrote there, and keeps engine.json beside this script.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from results import Benchmark

from lyapunov_prune.evaluation.llama_cpp import ask
from lyapunov_prune.evaluation.speed import prefill_and_decode
from lyapunov_prune.export.gguf import prune_gguf
from lyapunov_prune.export.gguf_original import gguf_identity
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.pruning.plan import PruningPlan

PROMPT, STEPS, REPEATS = 256, 32, 7  # the files take turns


def main() -> None:
    found = Benchmark("engine")
    with tempfile.TemporaryDirectory(prefix="lyapunov-prune-bench-", dir=Path.cwd()) as place:
        for argument in sys.argv[1:]:
            name, _, run = argument.rpartition("=")
            source, (first, last) = Path(name).absolute(), map(int, run.split("-"))
            layers, gone = read_header(source).layers, tuple(range(first, last + 1))
            small = Path(place) / source.name
            prune_gguf(str(source), PruningPlan.given(gguf_identity(str(source), planned=False), gone), small)
            timed = torch.randint(10_000, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(0)).tolist()
            answers = ask([source, small], [], timed=timed, prompt=PROMPT, repeats=REPEATS)
            speeds = [prefill_and_decode(PROMPT, a.seconds[:, 0], a.seconds[:, 1:].ravel()) for a in answers]
            kept = small.stat().st_size / source.stat().st_size
            what = f"llama.cpp, {source.stem}, {len(gone)} of {layers} layers removed"
            found.add(f"{what}: time per token", "dense time × kept bytes", speeds[0][2] / speeds[1][2] / kept, 1.10)
            share = speeds[0][0] / speeds[1][0] * layers / (layers - len(gone))
            found.add(f"{what}: prefill of {PROMPT}", "dense time × kept layers", share, 1.10)
            small.unlink()
    found.save()


if __name__ == "__main__":
    main()
