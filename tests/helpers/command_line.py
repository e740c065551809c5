"""The command line in tests: its arguments, and what a run left."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from helpers.forked import FORKED
from lyapunov_prune.evaluation.speed import measure_speed
from lyapunov_prune.healing import state as training_state
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.mending import judge


def words_of(svg: str) -> list[str]:
    return [text.strip() for text in ElementTree.fromstring(svg).itertext() if text.strip()]


def interrupted_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """From now on a run is interrupted after so many more steps, the state of each of which is kept."""
    left, take_step = [steps], Distillation.take_step

    def interrupt(self: Distillation, inputs: torch.Tensor, rate: float) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        take_step(self, inputs, rate)

    patch.setattr(Distillation, "take_step", interrupt)
    patch.setattr(training_state, "SECONDS", 0.0)
    patch.setattr(training_state, "_SHARE", math.inf)


def time_briefly(patch: pytest.MonkeyPatch) -> None:
    """`shrink` times one round of a few tokens."""
    few = partial(measure_speed, prompt=8, steps=1, repeats=1)
    patch.setattr("lyapunov_prune.shrinking.evaluated.measure_speed", lambda models, **_: few(models))


def judge_briefly(patch: pytest.MonkeyPatch, context: int) -> None:
    """The text that judges mending has eight windows, and one short round is timed."""
    patch.setattr(judge, "_TOKENS", 8 * context)
    patch.setattr(judge, "_CONTEXT", context)
    time_briefly(patch)


TEXT = ["--tokens", "128", "--context", "16"]  # eight windows: with fewer `best` refuses to choose


# Every way of writing a checkpoint of the folder `tiny`, without its output.
WRITERS = [
    ["prune", "tiny", "--layers", "1", *TEXT],
    ["prune", "tiny", "--layers", "1", "--device", "disk"],
    ["prune", "tiny", "--layers", "1", "--what", "attention", *TEXT],
    ["compress", "tiny", "--method", "magnitude", "--sparsity", "0.5"],
    ["compress", "tiny", "--method", "magnitude", "--sparsity", "0.5", "--device", "disk"],
    ["compress", "tiny", "--method", "rtn", "--bits", "4", "--format", "packed"],
    ["heal", "tiny", "--teacher", "tiny", "--steps", "1", *TEXT, "--context", "16"],
    ["export", "tiny"],
]


def writer_id(arguments: list[str]) -> str:
    return " ".join(a for a in arguments if a.isalpha())


QUICK = [*TEXT, "--seeds", "1"]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    changed: set[str]  # files and folders that came, went or changed


def tree() -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in Path().rglob("*")}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def launched_twice(script: Path) -> subprocess.CompletedProcess[str]:
    """`script` in two processes that know of each other, as `accelerate launch` starts one for each of two devices."""
    done = _launched(script)
    if -signal.SIGSEGV in done.args:  # inside gloo, perhaps pytorch issue 75529
        print(done.stderr, file=sys.stderr)
        done = _launched(script)
    return done


def _launched(script: Path) -> subprocess.CompletedProcess[str]:
    """What both printed; `args` are the two exit codes, of which `returncode` is the first that is not 0."""
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    envs = [{**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    done = FORKED.run_together(script.read_text(), envs, str(script.parent))
    codes, out, err = zip(*done, strict=True)
    return subprocess.CompletedProcess(codes, next(filter(None, codes), 0), "".join(out), "".join(err))


# Every command that takes a model, on the folder `tiny`.
COMMANDS: dict[str, list[str]] = {
    "profile": ["profile", "tiny", *QUICK],
    "rank": ["rank", "tiny", "--remove", "1", *TEXT],
    "prune": ["prune", "tiny", "--remove", "1", "-o", "out", *TEXT],
    "prune --layers": ["prune", "tiny", "--layers", "1", "-o", "out", *TEXT],
    "compress": ["compress", "tiny", "--sparsity", "0.5", "-o", "out", *TEXT],
    "eval": ["eval", "tiny", *TEXT],
    "check": ["check", "tiny", "--bounds", "--tokens", "16", "--context", "16"],
    "sensitivity": ["sensitivity", "tiny", "--study", "layer,removal", *TEXT],
}
