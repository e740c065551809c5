"""Time of the built-in model with two factors a matrix, over that of the dense one: part of `make bench`.

Writes factors.json beside this file.
"""

from __future__ import annotations

from results import Benchmark

import lyapunov_prune as lp
from lyapunov_prune.evaluation.speed import measure_speed
from lyapunov_prune.export.factors import with_factors

SPARSITIES = (0.2, 0.4, 0.6)
PROMPT, STEPS, REPEATS = 256, 48, 3


def main() -> None:
    model = lp.load("smollm2-135m").model
    models = {"dense": model}
    for sparsity in SPARSITIES:
        done = lp.compress(model, method="svd", sparsity=sparsity)  # how it was chosen does not matter to the time
        models[f"two factors a matrix, sparsity {sparsity:g}"] = with_factors(done.model, done.report.ranks)
    speed = measure_speed(models, prompt=PROMPT, steps=STEPS, repeats=REPEATS)
    found = Benchmark("factors")
    for row in speed.rows[1:]:
        found.add_speed(row, speed.rows[0], PROMPT)
    found.save()


if __name__ == "__main__":
    main()
