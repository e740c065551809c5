"""Time to calibrate a layer of experts, over that of a dense layer with as many active parameters.

`python benchmarks/experts.py` makes a layer of experts and a dense layer of random weights for each shape, gathers the
statistics of all their matrices on the same tokens, in turn, and keeps the ratios of processor time in experts.json.
The text has as many tokens as `compress` takes if it is not told. Of many experts some are then sent fewer tokens than
their matrices have inputs, and are run on lent ones as well, which a dense layer is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from results import Benchmark
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections

LIMIT, REPEATS, CONTEXT = 1.5, 3, 512
SHARED = {
    "vocab_size": 512,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 1,
}
# Experts of a layer, those that each token takes, and the windows of text.
SHAPES = {"8 experts, 2 a token": (8, 2, 512, 8), "32 experts, 4 a token": (32, 4, 256, 8)}


def main() -> None:
    torch.set_num_threads(1)
    found = Benchmark("experts")
    for shape, (experts, chosen, width, windows) in SHAPES.items():
        torch.manual_seed(0)
        mixture = made("qwen3_moe", num_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=width)
        dense = made("qwen3", intermediate_size=chosen * width)
        ids = torch.randint(SHARED["vocab_size"], (windows, CONTEXT))
        for needs in ("norms", "gram", "sensitivity"):
            jobs = {"mixture": calibration(mixture, ids, needs), "dense": calibration(dense, ids, needs)}
            seconds = least(jobs)
            ratio = seconds["mixture"] / seconds["dense"]
            found.add(
                f"calibration of a layer, {shape} (`{needs}`): time",
                "dense layer of as many active parameters",
                ratio,
                LIMIT,
            )
    found.save()


def made(kind: str, **shape: int) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHARED, **shape)).eval()


def calibration(model: PreTrainedModel, ids: torch.Tensor, needs: str) -> Callable[[], None]:
    projections = find_projections(wrap(model))
    return lambda: stream(model, ids, projections, needs, lambda here, statistics: None)


def least(jobs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Processor time of each job, the least of some turns."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(REPEATS):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            found[name].append(time.process_time() - start)
    return {name: min(seconds) for name, seconds in found.items()}


if __name__ == "__main__":
    main()
