"""The second-order update: inputs change one after another, and the later inputs compensate for each change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from lyapunov_prune.arguments import Count, NonNegative, Range
from lyapunov_prune.calibration.gram import damped
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.method import Method
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift


class SecondOrder(Method):
    """A method that minimises `Σ_t a_t ‖W x_t − Ŵ x̂_t‖²` over the matrices `Ŵ` that it can produce, input by input.

    `x̂` are the inputs after compression of the earlier layers, and
    `H = Σ_t a_t x̂_t x̂_tᵀ + damping · mean(diag) · I`.

    - `weighted`: `a_t ∝ ‖∂ℓ/∂y_t‖²` for the output `y_t` of the matrix, with mean 1, so that tokens count by how far
      their error moves the prediction (`calibration.downstream`). Otherwise `a_t = 1`. Kim et al., GuidedQuant (ICML
      2025, arXiv:2505.07004), with one group of output channels.
    - `correction` α: `x` are the inputs in the dense model. Up to a constant the sum is then `Σ_t a_t ‖(W* − Ŵ) x̂_t‖²`
      with the least-squares solution `W* = W + W D H⁻¹`, `D = Σ_t a_t (x_t − x̂_t) x̂_tᵀ`, and `W + α W D H⁻¹` is
      compressed in place of `W`. At α = 0, `x = x̂`. Arai and Ichikawa, Quantization Error Propagation (NeurIPS 2025,
      arXiv:2504.09629).
    """

    block: Count = 128
    damping: NonNegative = 0.01
    weighted: bool = False
    correction: Annotated[float, Range(0, 1)] = 0.0

    needs = "gram"

    def begin(self, W: torch.Tensor, statistics: Statistics | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The matrix to compress for `W` (m × n, float64, a copy), `H`, and a mask (n) of inputs that were always zero.

        `H_jj` is 1 for such an input. Raises LyapunovPruneError for a Gram matrix of another shape or without energy,
        and for a correction if the statistics have no `drift`.
        """
        (gram,) = self.needed(statistics)
        H = damped(gram, self.damping, W.device)
        dead = lift(gram).to(W.device).diagonal() == 0
        H.diagonal()[dead] = 1
        V = lift(W).clone()
        if self.correction:
            if statistics is None or statistics.drift is None:
                raise LyapunovPruneError("a correction needs the dense model's inputs too; calibrate with compress")
            drift = lift(statistics.drift).to(W.device)
            U = inverse_factor(H)
            V += self.correction * (V @ drift @ U.T @ U)
        return V, H, dead


def swept(
    V: torch.Tensor, U: torch.Tensor, choose: Callable[[int, torch.Tensor], torch.Tensor], block: int
) -> torch.Tensor:
    """Replace every column j of `V` (m × n, float64) by `q_j = choose(j, V)` and update the later ones; a new tensor.

    The update is `v_k ← v_k − (v_j − q_j) U_jk / U_jj` for k > j, with `U` from `inverse_factor(H)`. Among all changes
    of the later columns it has the least `tr(E H Eᵀ)` (Hassibi and Stork, NeurIPS 1992; Frantar and Alistarh,
    SparseGPT, ICML 2023, Algorithm 1). When `choose` is called for j, the columns from j to the end of its block of
    `block` columns have been updated for all earlier ones; the columns beyond the block are updated at its end.
    """
    n = V.shape[1]
    rows = V.T.contiguous()  # makes columns contiguous: a step is a few kernels on a GPU
    V = rows.T
    ratio = U / U.diagonal().unsqueeze(1)
    for start in range(0, n, block):
        end = min(start + block, n)
        here, error = rows[start:end], torch.empty_like(rows[start:end])
        each = zip(here.unbind(), error.unbind(), ratio[start:end, start:end].unbind(), strict=True)
        for i, (v, e, r) in enumerate(each):
            q = choose(start + i, V)
            torch.sub(v, q, out=e)
            here[i + 1 :].addr_(r[i + 1 :], e, alpha=-1)
            v.copy_(q)
        rows[end:].addmm_(ratio[start:end, end:].T, error, alpha=-1)
    return V.contiguous()


def inverse_factor(H: torch.Tensor) -> torch.Tensor:
    """The upper triangular `U` with `UᵀU = H⁻¹`: the inverse of the upper triangular `R` with `R Rᵀ = H`.

    `U_jj²` is `[(H_{j:,j:})⁻¹]_jj`. Raises LyapunovPruneError for an `H` (n × n, float64) that has no inverse.
    """
    L, info = torch.linalg.cholesky_ex(H.flip(0, 1))
    if int(info) != 0:
        raise LyapunovPruneError("the Gram matrix has no inverse; give more text or a larger damping")
    identity = torch.eye(len(H), dtype=H.dtype, device=H.device)
    return torch.linalg.solve_triangular(L.flip(0, 1), identity, upper=True)
