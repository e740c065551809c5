"""Time of a step of `heal` over its products, and memory of `heal --update-rank` over a bfloat16 base, in one run.

`python benchmarks/healing.py` takes four minutes on a core and writes healing.json beside this file. A step on the
built-in model is held against plain forwards, run before and after it, with as many products. The measured peak
of a small model of random weights has to be that of the arithmetic, which then says what the shapes of Llama 3 8B take.
It counts what lies where the models are: weights, factors with gradient and optimizer, activations, logits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from results import Benchmark
from run import EXACT, status
from transformers import AutoConfig, AutoModelForCausalLM
from whole import Counted

import lyapunov_prune as lp
from lyapunov_prune.forward import scoring
from lyapunov_prune.healing import distillation, training
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.trained import trained
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.surgery import share_memory

RANK, LIMIT = 16, 40e9
CLOSE = 1.15  # of the arithmetic, at most, is measured
REMOVED = [*range(12, 19), 25]  # of the built-in model, whose steps are timed


@dataclass(frozen=True)
class Shape:
    """A Llama, how many of its layers go, and the tokens of a window."""

    width: int
    inner: int
    keys: int  # width of the keys, and of the values
    vocabulary: int
    layers: int
    removed: int
    tokens: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Of a layer, output × input."""
        d, k, n = self.width, self.keys, self.inner
        return [(d, d), (k, d), (k, d), (d, d), (n, d), (n, d), (d, n)]

    @property
    def layer(self) -> int:
        """Parameters of a layer's matrices; its norms are a ten-thousandth of that."""
        return sum(m * n for m, n in self.matrices)

    @property
    def kept(self) -> int:
        return self.layers - self.removed

    @property
    def outside(self) -> int:
        """Parameters of embeddings and head."""
        return 2 * self.vocabulary * self.width

    def loading(self) -> float:
        """Both models, before they share what they have in common."""
        return 2 * (2 * self.outside + (self.layers + self.kept) * self.layer)

    def training(self) -> float:
        """The dense model, of which the student is a part, and what a step needs."""
        sides = sum(m + n for m, n in self.matrices)
        factors = 24 * RANK * sides * self.kept  # float32: the number, gradient, two moments, start, best so far
        inputs = 2 * self.kept * self.tokens * self.width
        # One layer, run again: inputs of the factors in float32, outputs in both dtypes and their gradients.
        again = self.tokens * sum(4 * n + 10 * m for m, n in self.matrices)
        # Of a block of positions, some of them three times widened; the states of all, and the way back.
        logits = 4 * scoring._ENTRIES + 12 * distillation._TOKENS * self.vocabulary + 3 * 2 * self.tokens * self.width
        return 2 * (self.outside + self.layers * self.layer) + factors + inputs + again + logits

    def merging(self) -> float:
        """The dense model, and the matrices that changed with their factors."""
        sides = sum(m + n for m, n in self.matrices)
        changed = 2 * self.kept * self.layer + 24 * RANK * sides * self.kept
        return 2 * (self.outside + self.layers * self.layer) + changed


TINY = Shape(64, 128, 16, 128, 3, 1, 32)
SMALL = Shape(1024, 3584, 256, 32_000, 12, 2, 1280)  # so many tokens that their logits come in blocks
LLAMA_8B = Shape(4096, 14_336, 1024, 128_256, 32, 4, 2048)


def main() -> None:
    if len(sys.argv) == 2:  # a child process: heal, and report the peaks
        print(*measured(SMALL))
        return
    command = [sys.executable, __file__, "measure"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **EXACT})
    training, whole = map(float, done.stdout.split())
    found = Benchmark("healing")
    first, again = step_ratios()
    what = "`heal`, a step on 256 tokens of the built-in model without eight layers"
    found.add(f"{what}: time", "its products at the rate of plain forwards", first, CLOSE)
    found.add("the same, of a window that came before", "its products at the rate of plain forwards", again, CLOSE)
    small = f"Llama of {(SMALL.outside + SMALL.layers * SMALL.layer) / 1e6:.0f}M"
    what = f"`heal`, rank {RANK}, recomputed layers, over bfloat16, {small}"
    found.add(f"{what}: peak memory of the steps", "arithmetic", training / SMALL.training(), CLOSE)
    most = max(SMALL.training(), SMALL.merging())
    found.add("the same, with merging", "arithmetic", whole / most, CLOSE)
    large = max(LLAMA_8B.loading(), LLAMA_8B.training(), LLAMA_8B.merging())
    found.add(f"by the same arithmetic, Llama 3 8B, {LLAMA_8B.tokens} tokens: all of it", "40 GB", large / LIMIT, 1.0)
    found.add("the same: the steps alone", "40 GB", LLAMA_8B.training() / LIMIT, 1.0)
    found.save()


def step_ratios() -> tuple[float, float]:
    """Processor time over that of the same products in plain forwards, of a step on a new window, and once more on it.

    Medians over windows, after one that warms up and one on which products are counted.
    """
    loaded = lp.load("smollm2-135m")
    student = lp.remove_layers(loaded.model, REMOVED)
    warm, counted, *timed = lp.load_text("builtin", loaded.tokenizer, tokens=7 * 256, context=256).ids.split(1)

    def plain(window: torch.Tensor) -> None:
        with torch.no_grad():
            loaded.model(window, use_cache=False)

    def seconds(job: Callable[[torch.Tensor], None], window: torch.Tensor) -> float:
        began = time.process_time()
        job(window)
        return time.process_time() - began

    def flops(job: Callable[[torch.Tensor], None]) -> int:
        with Counted() as found:
            job(counted)
        return found.flops

    with trained(student, None, 0) as parameters:
        run = Distillation(student, loaded.model, parameters, 1.0)

        def step(window: torch.Tensor) -> None:
            run.take_step(window, 0.0)

        for job in (plain, step):
            job(warm)
        forward, *products = map(flops, (plain, step, step))
        ratios = []
        for window in timed:
            before, *taken, after = (seconds(job, window) for job in (plain, step, step, plain))
            ratios.append([s / (n / forward * (before + after) / 2) for s, n in zip(taken, products, strict=True)])
    first, again = (median(of) for of in zip(*ratios, strict=True))
    return first, again


def measured(shape: Shape) -> tuple[float, float]:
    """Peak bytes of the steps, and of all that `heal` does, with the dense model (Linux)."""
    if shape is not TINY:
        measured(TINY)  # what the first call alone takes, of libraries
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=16,
        num_key_value_heads=16 * shape.keys // shape.width,
        tie_word_embeddings=False,
    )
    before = status("VmRSS")
    teacher = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plan = PruningPlan.given(teacher, range(1, 1 + shape.removed))
    student = lp.remove_layers(teacher, plan)
    share_memory(student, wrap(teacher), plan)
    g = torch.Generator().manual_seed(0)
    ids, judge = (
        torch.randint(shape.vocabulary, (n, tokens), generator=g) for n, tokens in ((3, shape.tokens), (4, 32))
    )
    peaks = []

    take_step = Distillation.take_step

    def watched(run: Distillation, inputs: torch.Tensor, rate: float) -> None:
        take_step(run, inputs, rate)
        peaks.append(status("VmHWM") - before)

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    # As if memory were short, so that layers are run again.
    with patch.object(Distillation, "take_step", watched), patch.object(training, "free_memory", lambda device: 0):
        lp.heal(student, teacher, ids, steps=2, rank=RANK, judge=judge)
    return peaks[-1], status("VmHWM") - before


if __name__ == "__main__":
    main()
