"""Run llama.cpp on GGUF files (`pip install lyapunov-prune[engines]`).

llama.cpp runs in a process of its own (`llama_cpp_process`) with a time limit, because it may crash or hang.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from lyapunov_prune.errors import LyapunovPruneError, require_extra

ENGINE = "xllamacpp", "engines", "running llama.cpp"  # library, extra, and what needs it
INSTALL = "xllamacpp is not installed (pip install lyapunov-prune[engines])"
BATCH = 256  # tokens read at once
_PROGRAM = Path(__file__).with_name("llama_cpp_process.py")
# Time limit: this many seconds, plus one for every MB of the files and thousand tokens.
_SECONDS = 600.0


@dataclass(frozen=True)
class Predictions:
    """What llama.cpp predicts over one window.

    `ids` (n,) are the tokens of the window, followed by those that llama.cpp wrote; `next` (n − 1,) the log-probability
    of each token after the first, in nats; `tokens` and `values` (n − 1 × top) the most likely tokens after each
    position, and their log-probabilities.
    """

    ids: np.ndarray
    next: np.ndarray
    tokens: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Answers:
    """What llama.cpp computed with one file.

    `windows` holds the predictions over each window of tokens, `seconds` (repeats × [prompt, step, step, …]) the times,
    and `sliding` the size of the sliding window in the file's header, 0 for none.
    """

    windows: tuple[Predictions, ...]
    seconds: np.ndarray
    sliding: int


def installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def ask(
    files: Sequence[Path],
    windows: Sequence[Sequence[int]],
    *,
    greedy: int = 0,
    top: int = 1,
    batch: int = BATCH,
    timed: Sequence[int] = (),
    prompt: int = 0,
    repeats: int = 0,
) -> list[Answers]:
    """Predictions of llama.cpp with each of `files` over `windows`, and over `greedy` tokens that it writes after each.

    With `repeats`, it also reads the first `prompt` ids of `timed` and then the others one by one, `repeats` times, and
    the files take turns. Raises LyapunovPruneError if xllamacpp is not installed, and if llama.cpp does not load a
    file, crashes, or takes too long.
    """
    require_extra(*ENGINE)
    question = {
        "files": [str(file.absolute()) for file in files],
        "windows": [[int(token) for token in window] for window in windows],
        "greedy": greedy,
        "top": top,
        "batch": batch,
        "timed": [int(token) for token in timed],
        "prompt": prompt,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
    }
    tokens = sum(len(window) + greedy for window in windows) + (1 + repeats) * len(timed)
    limit = _SECONDS + sum(file.stat().st_size for file in files) / 1e6 * tokens / 1000
    with TemporaryDirectory(prefix="lyapunov-prune-engine-") as folder:
        asked, told = Path(folder) / "asked.json", Path(folder) / "told.npz"
        asked.write_text(json.dumps(question), encoding="utf-8")
        _run([sys.executable, "-P", str(_PROGRAM), str(asked), str(told)], folder, limit, told, files)
        with np.load(told) as found:
            return [_answers(found, i, len(windows), repeats) for i in range(len(files))]


def _run(command: list[str], folder: str, limit: float, told: Path, files: Sequence[Path]) -> None:
    names = " and ".join(file.name for file in files)
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit, cwd=folder)
        if told.is_file():
            return
        lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if "error" in line.lower()]
        why = lines[0].strip()[:160] if lines else f"it ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        why = f"it was not done within {limit:.0f} s"
    raise LyapunovPruneError(f"llama.cpp does not run {names}: {why}; try it by hand")


def _answers(found: dict[str, np.ndarray], file: int, windows: int, repeats: int) -> Answers:
    names = ("ids", "next", "tokens", "values")
    made = [Predictions(*(found[f"{file}.{k}.{name}"] for name in names)) for k in range(windows)]
    seconds = np.array([found[f"{file}.seconds.{turn}"] for turn in range(repeats)])
    return Answers(tuple(made), seconds, int(found[f"{file}.window"]))
