"""A GGUF file in llama.cpp (`pip install lyapunov-prune[engines]`), held against the model that it should be.

llama.cpp runs in a process of its own (`llama_cpp_process`), which is bounded in time and may crash. It rounds what
enters a matrix to 8 bits, so its numbers are not those of PyTorch. How far off they may be is measured: three times as
far as with the original file, on the same prompts.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.progress import status

ENGINE = "same in llama.cpp"
_SECONDS = 600
_PROGRAM = Path(__file__).with_name("llama_cpp_process.py")
_TOP, _GREEDY = 10, 64
_TIMES, _LEAST = 3.0, 0.02  # the limit: so many times the deviation of the original, and at least so many nats


def installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def prompts_of(inputs: Sequence[torch.Tensor]) -> list[list[int]]:
    """Every row of `inputs`, and the first half of each; the whole ones are longer than a batch of llama.cpp's here."""
    rows = [row.tolist() for ids in inputs for row in ids]
    return [prompt for row in rows for prompt in (row, row[: len(row) // 2])]


def engine_check(
    original: Path, dense: Decoder, file: Path, smaller: Decoder, inputs: Sequence[torch.Tensor]
) -> GateCheck:
    """Whether llama.cpp computes with `file` what `smaller` does, as well as it computes with `original` what `dense`
    does: the log-probabilities of the tokens that it likes best, and 64 tokens of greedy text.

    Where it writes another token than `smaller` would, both must be as likely up to the limit. Raises
    LyapunovPruneError when llama.cpp does not run the original.
    """
    prompts = prompts_of(inputs)
    with status("llama.cpp, with the original"):
        own = _deviation(dense, prompts, _answers(original, prompts))
    limit = max(_LEAST, _TIMES * own)
    with status("llama.cpp, with what was written"):
        try:
            answers = _answers(file, prompts)
        except LyapunovPruneError as error:
            return GateCheck(ENGINE, False, float("inf"), limit, str(error).partition(";")[0])
    worst = _deviation(smaller, prompts, answers)
    detail = f"nats, at {sum(map(bool, answers))} prompts and {_GREEDY} greedy tokens (with the original {own:.2g})"
    return GateCheck(ENGINE, worst <= limit, worst, limit, detail)


def _deviation(decoder: Decoder, prompts: Sequence[list[int]], answers: Sequence[list[dict[str, Any]]]) -> float:
    """The largest difference of a log-probability, in nats."""
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        if not answer:
            continue
        said = [step["id"] for step in answer]
        ids = torch.tensor([prompt + said[:-1]], device=decoder.model.device)
        with torch.no_grad():
            logits = decoder.model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()
        ours = logits.log_softmax(-1)
        first = {each["id"]: each["logprob"] for each in answer[0]["top_logprobs"]}
        worst = max(worst, *(abs(float(ours[0, token]) - theirs) for token, theirs in first.items()))
        behind = ours.max(-1).values - ours[torch.arange(len(said)), torch.tensor(said)]
        worst = max(worst, float(behind.max()) / 2)  # two tokens, each of which may be off
    return worst


def _answers(file: Path, prompts: Sequence[list[int]]) -> list[list[dict[str, Any]]]:
    """What llama.cpp says to each prompt: tokens with the log-probabilities of those that it likes best.

    It leaves out tokens that are a part of a character. An answer that lacks any is empty here, since which one stands
    where is not known. Raises LyapunovPruneError when no answer is whole, and when llama.cpp does not load the file,
    crashes, or takes too long.
    """
    with TemporaryDirectory(prefix="lyapunov-prune-engine-") as folder:
        asked, told = Path(folder) / "asked.json", Path(folder) / "told.json"
        asked.write_text(json.dumps(prompts), encoding="utf-8")
        paths, numbers = [file.absolute(), asked, told], [_TOP, _GREEDY]
        command = [sys.executable, "-P", *map(str, [_PROGRAM, *paths, *numbers])]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_SECONDS, cwd=folder)
        except subprocess.TimeoutExpired:
            raise LyapunovPruneError(f"llama.cpp was not done within {_SECONDS} seconds; try it by hand") from None
        if not told.is_file():
            lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if "error" in line.lower()]
            why = lines[0].strip()[:160] if lines else f"it ended with {done.returncode}"
            raise LyapunovPruneError(f"llama.cpp does not run {file.name}: {why}; try it by hand")
        answers = json.loads(told.read_text(encoding="utf-8"))
    whole = [answer if len(answer) == (1 if i else _GREEDY) else [] for i, answer in enumerate(answers)]
    if not any(whole):
        raise LyapunovPruneError(f"llama.cpp answers no prompt of {file.name} in whole characters; try it by hand")
    return whole
