"""A program that lets llama.cpp continue prompts, and writes what it says. It imports nothing of this package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

BATCH = 64  # shorter than the prompts, so that they are read in several


def run(file: str, asked: str, told: str, top: str, greedy: str) -> None:
    import xllamacpp

    prompts = json.loads(Path(asked).read_text(encoding="utf-8"))
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = max(map(len, prompts)) + int(greedy) + 8
    params.n_batch = params.n_ubatch = BATCH
    params.n_parallel, params.n_gpu_layers, params.warmup = 1, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # several wait for one another by spinning
    server = xllamacpp.Server(params)
    answers = []
    for i, prompt in enumerate(prompts):
        said = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": int(greedy) if i == 0 else 1,
                "temperature": 0,
                "n_probs": int(top),
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        answers.append((said["choices"][0]["logprobs"] or {}).get("content", []))
    partial = Path(f"{told}.partial")
    partial.write_text(json.dumps(answers), encoding="utf-8")
    partial.rename(told)


if __name__ == "__main__":
    run(*sys.argv[1:])
