"""Perplexity and speed of GGUF files in llama.cpp, beside this program's own perplexity of the same windows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import CheckFailed, require_extra
from lyapunov_prune.evaluation.llama_cpp import ENGINE, ask
from lyapunov_prune.evaluation.perplexity import Perplexity
from lyapunov_prune.evaluation.speed import SpeedRow, speed_columns, speed_rows
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.models.gguf import gguf_file
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.progress import status
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.wording import number

# Most nats a token by which the loss in llama.cpp, which rounds the inputs of matrices to 8 bits, may differ from ours:
# 0.012 on Gemma 3 270M in Q4_K_M, 0.003 on SmolLM2 in Q4_1; a lost rotary scaling gave 0.07.
SAME = 0.05
STEPS = 16  # tokens decoded after each prompt
REPEATS = 5


@dataclass(frozen=True)
class EngineScores(Result):
    """Perplexity and speed of GGUF files in llama.cpp; the first file is the reference.

    `perplexities` are those of llama.cpp, `own` those of this program on the same windows. Speeds are those of
    `measure_speed`: medians over `repeats` prompts of `prompt` tokens, and over all of the `steps` tokens that are read
    one at a time after each prompt. The files take turns, on `threads` threads.
    """

    perplexities: tuple[Perplexity, ...]
    own: tuple[float, ...]
    rows: tuple[SpeedRow, ...]
    types: tuple[str, ...]  # by file, the quantisation type of most of its numbers
    prompt: int
    steps: int
    repeats: int
    threads: int
    engine: str

    @property
    def measured_on(self) -> tuple[MeasuredOn, ...]:
        return tuple(perplexity.measured_on for perplexity in self.perplexities)

    def require_same(self) -> None:
        """Raise CheckFailed if a file has another loss in llama.cpp than here, by more than `SAME` nats a token."""
        for theirs, ours in zip(self.perplexities, self.own, strict=True):
            if not abs(theirs.nll - math.log(ours)) <= SAME:
                raise CheckFailed(
                    f"llama.cpp disagrees about {theirs.measured_on.model.name}: perplexity {theirs.value:.4g} there, "
                    f"{ours:.4g} here; trust neither, and convert the original checkpoint again"
                )

    def to_frame(self) -> pd.DataFrame:
        columns = {
            "model": [row.model for row in self.rows],
            "type": self.types,
            "perplexity": [each.value for each in self.perplexities],
            "here": self.own,
            **speed_columns(self.rows),
        }
        frame = pd.DataFrame(columns)
        return frame if len(self.rows) > 1 else frame.drop(columns=["prefill ratio", "decode ratio"])

    def headline(self) -> str:
        return (
            f"In {self.engine}, {self.threads} thread{'s' * (self.threads > 1)}: the same windows; prompt of "
            f"{self.prompt}, {self.steps} tokens decoded, {self.repeats} times"
        )

    def answer(self) -> list[str]:
        last, row, first = self.perplexities[-1], self.rows[-1], self.rows[0]
        beside = "" if row is first else f" ({row.told('prefill')}; {row.told('decode')})"
        return [
            f"In llama.cpp: perplexity {last.value:.4g}, and {self.own[-1]:.4g} here; {number(row.prefill)} tokens/s "
            f"of prefill, {number(row.decode)} decoding{beside}."
        ]


def engine_files(names: Sequence[str]) -> list[Path]:
    """The GGUF files of the models called `names`; empty unless each of them is one.

    Raises LyapunovPruneError if xllamacpp, which runs them, is not installed.
    """
    files = [file for name in names if (file := gguf_file(name)) is not None]
    if len(files) < len(names):
        return []
    require_extra(*ENGINE)
    return files


def engine_scores(files: Sequence[Path], own: Sequence[Perplexity], batch: TokenBatch, prompt: int) -> EngineScores:
    """Score and time GGUF files in llama.cpp on the windows of `batch`; `own` is the perplexity measured here.

    Raises LyapunovPruneError when llama.cpp does not load a file, crashes, or takes too long.
    """
    ids, vocabulary = batch.ids.tolist(), int(batch.ids.max()) + 1
    timed = torch.randint(vocabulary, (prompt + STEPS,), generator=torch.Generator().manual_seed(0)).tolist()
    with status("llama.cpp"):
        answers = ask(files, ids, timed=timed, prompt=prompt, repeats=REPEATS)
    scores, types = [], []
    for file, mine, answer in zip(files, own, answers, strict=True):
        windows = -np.array([said.next.astype(np.float64).mean() for said in answer.windows])
        require_numbers(windows, f"losses of {file.name} by llama.cpp", "try it by hand")
        scores.append(replace(mine, nll=float(windows.mean()), windows=windows))
        kinds = Counter[str]()
        for tensor in read_header(file).tensors:
            kinds[tensor.quantisation] += tensor.size
        types.append(kinds.most_common(1)[0][0])
    return EngineScores(
        perplexities=tuple(scores),
        own=tuple(each.value for each in own),
        rows=speed_rows(
            [(mine.measured_on.model.name, mine.measured_on.model.parameters) for mine in own],
            prompt,
            [answer.seconds[:, 0] for answer in answers],
            [answer.seconds[:, 1:] for answer in answers],
        ),
        types=tuple(types),
        prompt=prompt,
        steps=STEPS,
        repeats=REPEATS,
        threads=torch.get_num_threads(),
        engine=f"llama.cpp (xllamacpp {version('xllamacpp')})",
    )
