"""What experiments that run the program's own commands share: each command once, and two checkpoints held together."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import typer

import lyapunov_prune as lp
from experiments.common import plain
from experiments.statements import ratio
from lyapunov_prune.evaluation.judging import compare


@dataclass(frozen=True)
class Ran:
    """A finished command: its `options` without folders of this machine, exit `code` and `seconds` of the processor."""

    options: str
    code: int
    seconds: float


def used() -> float:
    """Seconds of the processor that finished child processes took: those of a clock count other work on the machine."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def run_once(output: Path, command: list[str]) -> Ran:
    """Run `lyapunov-prune` with these words and `-o output`, or read what is kept beside `output` of an earlier run.

    Exit codes 0 and 1 (a check failed: nothing was written) are kept. Any other one ends this program with that code.
    """
    record = output.with_suffix(".json")
    if not record.is_file():
        print(f"lyapunov-prune {shlex.join(command)}", file=sys.stderr)
        before = used()
        done = subprocess.run([sys.executable, "-m", "lyapunov_prune.cli", *command, "-o", str(output)], check=False)
        if done.returncode not in (0, 1):
            raise typer.Exit(done.returncode)
        record.write_text(json.dumps({"code": done.returncode, "seconds": used() - before}))
    kept = json.loads(record.read_text())
    return Ran(shlex.join([plain(word) for word in command]), kept["code"], kept["seconds"])


def losses(checkpoint: Path, judged: lp.TokenBatch, name: str) -> np.ndarray:
    """The loss of every window of `judged`, nats a token."""
    return lp.perplexity(lp.load(str(checkpoint)).model, judged, description=name).windows


def against(before: np.ndarray, after: np.ndarray) -> str:
    """Better or worse by the paired interval over windows, or neither; and the ratio of perplexities."""
    found = compare(before, after)
    word = "better" if found.high < 0 else "worse" if found.low > 0 else "no significant difference"
    return f"{word}: {ratio(after - before)}"
