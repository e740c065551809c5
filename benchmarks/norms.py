"""Certified norms on every matrix of a model: time against svdvals, excess over the exact norm.

    python benchmarks/norms.py [MODEL] [--sparsity 0.5]

Each matrix of the layers, and each residual that magnitude pruning leaves of it. The times of
`torch.linalg.svdvals` are taken in the dtype of the model (float32), the certificate works in float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from lyapunov_prune.linalg import certified_norm, exact_norm
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.structure import find_structure


def seconds(work: Callable[[], object]) -> float:
    """The best of three, for a machine that does other things as well."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def residual(W: torch.Tensor, sparsity: float) -> torch.Tensor:
    """What magnitude pruning removes: the smallest entries."""
    limit = W.abs().flatten().kthvalue(max(1, int(sparsity * W.numel()))).values
    return torch.where(W.abs() <= limit, W, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--every", type=int, default=1, help="take every n-th matrix only")
    arguments = parser.parse_args()

    layers = find_structure(load(arguments.model).model).layers
    weights = {name: p.detach().float() for name, p in layers.named_parameters() if p.ndim == 2}
    weights = dict(list(weights.items())[:: arguments.every])
    for kind in ("weights", "residuals"):
        certified = svd = worst_ratio = worst_excess = 0.0
        below = 0
        for W in weights.values():
            A = W if kind == "weights" else residual(W, arguments.sparsity)
            ours, theirs = seconds(lambda A=A: certified_norm(A)), seconds(lambda A=A: torch.linalg.svdvals(A))
            certified, svd = certified + ours, svd + theirs
            worst_ratio = max(worst_ratio, ours / theirs)
            exact, bound = exact_norm(A), certified_norm(A)
            below += bound < exact * (1 - 1e-12)
            worst_excess = max(worst_excess, bound / exact - 1)
        print(
            f"{kind}: {len(weights)} matrices, certified {certified:.1f} s, svdvals {svd:.1f} s, ratio "
            f"{certified / svd:.2f} (worst of one matrix {worst_ratio:.2f}); worst excess {worst_excess:.2e}; "
            f"{below} below the exact norm"
        )


if __name__ == "__main__":
    main()
