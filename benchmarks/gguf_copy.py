"""`prune_on_disk` of a GGUF file beside `cp` of what it keeps, and its peak memory.

Run as `python benchmarks/gguf_copy.py FILE.gguf`. It works in the current folder, deletes what it wrote there, and
keeps gguf_copy.json beside this script.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from results import Benchmark

from lyapunov_prune.export.gguf import prune_gguf
from lyapunov_prune.export.gguf_original import gguf_identity
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.pruning.plan import PruningPlan

REPEATS, ALLOWED = 5, 500e6  # the least of so many turns; bytes that the command may hold at most
_PEAK = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
)


def main() -> None:
    source = Path(sys.argv[1]).absolute()
    layers = read_header(source).layers
    gone = tuple(range(layers - layers // 4 - 1, layers - 1))  # a quarter
    identity = gguf_identity(str(source), planned=False)
    with tempfile.TemporaryDirectory(prefix="lyapunov-prune-bench-", dir=Path.cwd()) as place:
        kept, target = Path(place) / "kept.gguf", Path(place) / "target.gguf"
        plan = PruningPlan.given(identity, gone)
        prune_gguf(str(source), plan, kept)
        copy = ["cp", str(kept), str(target)]
        seconds = least(
            target,
            {
                "cp": lambda: subprocess.run(copy, check=True),
                "cp and sync": lambda: (
                    subprocess.run(copy, check=True),
                    subprocess.run(["sync", str(target)], check=True),
                ),
                "prune": lambda: prune_gguf(str(source), plan, target),
            },
        )
        found = Benchmark("gguf_copy")
        what = f"`prune X.gguf --device disk -o Y.gguf`, {source.stat().st_size / 1e9:.2g} GB: time"
        found.add(what, "`cp` of the kept bytes", seconds["prune"] / seconds["cp"], 1.5)
        ratio = seconds["prune"] / seconds["cp and sync"]
        found.add("the same: time", "`cp` of the kept bytes, and `sync` of them", ratio, 1.5)
        command = [
            "-m",
            "lyapunov_prune.cli",
            "prune",
            str(source),
            "--device",
            "disk",
            "--layers",
            ",".join(map(str, gone)),
        ]
        child = [sys.executable, "-c", _PEAK, sys.executable, *command, "-o", str(target)]
        peak = float(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
        found.add("the same command: peak memory", "500 MB", peak / ALLOWED, 1.0)
        found.save()


def least(target: Path, jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The least seconds of each job, which writes `target` anew every time; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(REPEATS):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
            target.unlink()
    return {name: min(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
