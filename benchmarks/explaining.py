"""What `explain` takes on the built-in model rounded to four bits, beside plain forwards.

Writes explaining.json beside this file.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

import torch
from results import Benchmark

import lyapunov_prune as lp

TOKENS, REPEATS = 128, 5
MEGABYTES = 2**20


def main() -> None:
    torch.manual_seed(0)
    loaded = lp.load("smollm2-135m")
    batch = lp.load_text("builtin", loaded.tokenizer, tokens=TOKENS, context=TOKENS)
    compressed = lp.compress(loaded, method="rtn", bits=4).model
    model, layers = loaded.model, loaded.structure.num_layers

    def plain() -> None:
        with torch.no_grad():
            model(batch.ids, use_cache=False)

    run = 0

    def count(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        nonlocal run
        if output.shape[1] == TOKENS:  # not what is tried beforehand on a few tokens
            run += len(output)

    plain()  # warms up
    before = [seconds(plain) for _ in range(REPEATS)]
    hooks = [p.register_forward_hook(count) for m in (model, compressed) for p in queries(m)]
    taken = seconds(lambda: lp.explain(loaded, compressed, batch))
    for hook in hooks:
        hook.remove()
    forward = statistics.median([*before, *(seconds(plain) for _ in range(REPEATS))])
    found = Benchmark("explaining")
    limit = 1.3 * layers + 2
    against = f"1.3 × L + 2 = {limit:g} plain forwards"
    found.add("`explain`, 128 tokens, 4 bits: layers that run", against, run / layers / limit, 1.0)
    found.add("the same: time of the processor, predictions and norms too", against, taken / forward / limit, 1.0)
    both = sum(p.nbytes for each in (model, compressed) for p in each.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found.add("the same: peak memory", "both models + 600 MB", peak / (both + 600 * MEGABYTES), 1.0)
    found.save()


def queries(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("q_proj")]


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
