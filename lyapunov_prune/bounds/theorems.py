"""The theorems of `lean/`: their statements, the functions that use them, and whether Lean verified them here.

In a checkout, `tools/lean_sources.py` compares this registry with the Lean sources, in the tests and before lake runs.
An installed package has neither and lists the claims. A row is a theorem over the real numbers; `kind` says what kind
of Python function uses it. A function that computes in floating point proves nothing, however often it passes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lyapunov_prune.errors import CheckFailed, LyapunovPruneError, reported
from lyapunov_prune.results.files import write_whole

STAMP = Path(".lake") / "lyapunov_prune_verified.json"
_VERIFY = "lyapunov-prune theorems --verify"


@dataclass(frozen=True)
class Theorem:
    """One row of the registry.

    `digest` covers the signature and everything it depends on (`tools/lean_sources.py` prints the new one after an
    intended change).
    """

    number: str | None  # in the structural sensitivity paper; None beyond its twelve
    name: str  # in the Lean namespace LyapunovPrune
    module: str
    paper: str
    statement: str
    digest: str
    used_by: tuple[str, ...] = ()  # Python functions whose docstrings name this theorem
    kind: str = ""  # "checker" or "measurement"; empty without functions
    unused: str = ""  # why no function uses it, for the paper's twelve

    @property
    def file(self) -> str:
        return f"LyapunovPrune/{self.module}.lean"


@dataclass(frozen=True)
class Verification:
    """Whether Lean verified the sources on this machine, and how that is known."""

    verified: bool
    message: str


def theorems() -> tuple[Theorem, ...]:
    """Every theorem that the project claims, in the order of the papers."""
    return _THEOREMS


def source_root() -> Path | None:
    """The folder `lean/` of this checkout; None for an installed package."""
    repository = Path(__file__).resolve().parents[2]
    return repository / "lean" if (repository / "lakefile.lean").is_file() else None


def verification(root: Path | None = None) -> Verification:
    """What is known on this machine about the sources in `root` (default: this checkout's)."""
    root = root or source_root()
    if root is None:
        return _not_verified("the Lean sources are not part of an installed package; clone the repository")
    try:
        stamp = json.loads((root.parent / STAMP).read_text(encoding="utf-8"))
        known, toolchain = stamp["digest"], stamp["toolchain"]
    except FileNotFoundError:
        return _not_verified("lake is not installed" if shutil.which("lake") is None else f"run `{_VERIFY}`")
    except (OSError, ValueError, TypeError, KeyError):
        return _not_verified(f"{root.parent / STAMP} is damaged; run `{_VERIFY}`")
    if known != sources_digest(root):
        return _not_verified(f"the sources or the registry changed since Lean last checked them; run `{_VERIFY}`")
    return Verification(True, f"verified here: `lake build` and `lake test` passed with {toolchain}")


def verify(root: Path | None = None) -> Verification:
    """Check the registry against the sources, fetch Mathlib's build files, run `lake build` and `lake test`.

    Records success. The first run downloads gigabytes, see lean/README.md. Raises LyapunovPruneError when this cannot
    run, and CheckFailed when the registry does not match or lake fails.
    """
    root, lake = root or source_root(), shutil.which("lake")
    if root is None or lake is None:
        what = "the Lean sources are not part of an installed package; clone the repository"
        raise LyapunovPruneError(what if root is None else "lake is not installed; install elan (lean/README.md)")
    repository, before = root.parent, sources_digest(root)
    (repository / STAMP).unlink(missing_ok=True)
    _run(sys.executable, "tools/lean_sources.py", cwd=repository)
    for arguments in (["exe", "cache", "get"], ["build"], ["test"]):
        _run(lake, *arguments, cwd=repository)
    if sources_digest(root) != before:
        raise CheckFailed("the Lean sources changed while lake ran; run it again")
    toolchain = (repository / "lean-toolchain").read_text(encoding="utf-8").strip()
    write_whole(repository / STAMP, json.dumps({"digest": before, "toolchain": toolchain}) + "\n")
    return verification(root)


def sources_digest(root: Path) -> str:
    """SHA-256 over the sources, the lakefile, the Lean and Mathlib pins, and the registry."""
    pins = [root.parent / name for name in ("lakefile.lean", "lean-toolchain", "lake-manifest.json")]
    digest = hashlib.sha256(repr([(t.name, t.file, t.digest) for t in _THEOREMS]).encode())
    for path in [*pins, *sorted(root.rglob("*.lean"))]:
        name = path.relative_to(root.parent).as_posix().encode()
        data = path.read_bytes() if path.is_file() else b""
        digest.update(b"%d %d %s %s" % (len(name), len(data), name, data))
    return digest.hexdigest()


def _not_verified(why: str) -> Verification:
    return Verification(False, f"not verified here: {why}")


def _run(program: str, *arguments: str, cwd: Path) -> None:
    remedy = "run this command by another Python" if program == sys.executable else "reinstall elan"
    with reported(f"cannot run {program}", remedy):
        # To stderr, because stdout may carry JSON.
        status = subprocess.run([program, *arguments], cwd=cwd, stdout=2, check=False).returncode
    if status != 0:
        command = " ".join([Path(program).name, *arguments])
        raise CheckFailed(f"`{command}` ended with status {status}; its output says why")


# fmt: off
_THEOREMS = (
    Theorem("1", "retrieval_bound", "Approximation", "structural sensitivity §3, Thm 1",
            "Reusing the output for a cached input x' costs at most ‖W‖ ‖x - x'‖.",
            "85fc39357918459d", ("lyapunov_prune.bounds.checkers.retrieval_bound",), "checker"),
    Theorem("1", "retrieval_bound_of_le", "Approximation", "structural sensitivity §3, Thm 1",
            "A cache that answers within radius ε costs at most ‖W‖ ε.",
            "379dd52f3d225230", ("lyapunov_prune.bounds.checkers.retrieval_bound",), "checker"),
    Theorem("2", "sparse_activation_bound", "Approximation", "structural sensitivity §3, Thm 2",
            "Replacing W by S costs at most ‖W - S‖ ‖x‖.",
            "5c11fe738239e1be", ("lyapunov_prune.bounds.checkers.sparse_activation_bound",), "checker"),
    Theorem("3", "interpolation_bound", "Approximation", "structural sensitivity §3, Thm 3",
            "Replacing W = L + R by L costs at most ‖R‖ ‖x‖.",
            "8f0593f85bce2e56", ("lyapunov_prune.bounds.checkers.interpolation_bound",), "checker"),
    Theorem("4", "composition_bound", "Approximation", "structural sensitivity §3, Thm 4",
            "Cache, sparsity and low rank together cost at most ‖W‖ ε + ‖W - S‖ ‖x'‖ + ‖S - L‖ ‖x'‖.",
            "edcd6242ddc72e4a", ("lyapunov_prune.bounds.checkers.composition_bound",), "checker"),
    Theorem("5", "efficiency_dominance", "Approximation", "structural sensitivity App. A, Thm 5",
            "A look-up that costs no more than it saves and an approximation no dearer than the "
            "dense product: the expected cost is no more than the dense one.",
            "1f7d41619b9099e3",
            unused="nothing here is looked up or left out to save time: a cache and a low rank are simulated with "
            "dense products, and `eval --speed` measures time"),
    Theorem("5", "low_rank_cost_le", "Approximation", "structural sensitivity App. A, Thm 5",
            "A rank-r factorisation of an m × n matrix costs no more than the matrix when r (m + n) ≤ m n.",
            "f050cb57a03208c7",
            unused="its arithmetic chooses the rank for a sparsity, and which matrices `compress --format compact` "
            "stores as two factors; it is a count, which no checker has to hold against activations"),
    Theorem("6", "adaptive_monotonicity", "Approximation", "structural sensitivity App. A, Thm 6",
            "The bound of Theorem 4 is monotone in each of its three budgets.",
            "59c37b8d41bc7401", ("lyapunov_prune.bounds.checkers.composition_bound",), "checker"),
    Theorem("7", "multi_layer_error_bound", "Propagation", "structural sensitivity §4.2, Thm 7",
            "When no layer stretches the error, the local errors add up.",
            "20d61b22fba7e0cd",
            unused="where no layer stretches the error, K ≤ 1, `trajectory_error_le` with K as measured is checked, "
            "and its bound is no larger (`composedBound_mono`)"),
    Theorem("7", "multi_layer_error_bound_of_le", "Propagation", "structural sensitivity §4.2, Thm 7",
            "With a common local error δ the total after n layers is at most e₀ + n δ.",
            "2f6ad9f9b2a6a494",
            unused="Theorem 7 with every local error as large as the largest: larger still"),
    Theorem("8", "lyapunov_contraction_bound", "Propagation", "structural sensitivity §4.2, Thm 8",
            "When every layer contracts the error by γ < 1, n layers leave at most γⁿ e₀ + δ (1 - "
            "γⁿ)/(1 - γ).",
            "dc6c11b4abf4a2c4", ("lyapunov_prune.bounds.checkers.lyapunov_contraction_bound",), "checker"),
    Theorem("8", "lyapunov_contraction_bound_uniform", "Propagation", "structural sensitivity §4.2, Thm 8",
            "The same without the depth: at most γⁿ e₀ + δ/(1 - γ).",
            "afc09d9d9d67a141",
            unused="the depth is known wherever Theorem 8 is checked, and with it the bound is smaller"),
    Theorem("9", "relative_error_le", "Contraction", "structural sensitivity §4.2, Thm 9",
            "If the error grows by at most a and the state by at least g, the relative error changes "
            "by at most a/g.",
            "cf3064dff11e527d", ("lyapunov_prune.bounds.checkers.residual_growth_contraction",), "checker"),
    Theorem("9", "residual_growth_contraction", "Contraction", "structural sensitivity §4.2, Thm 9",
            "A layer whose state grows faster than its error lowers the relative error energy.",
            "35ab4d0d219ed896", ("lyapunov_prune.bounds.checkers.residual_growth_contraction",), "checker"),
    Theorem("10", "preln_contraction_sufficient", "Contraction", "structural sensitivity §4.2, Thm 10",
            "A pre-norm residual layer contracts if a² < 1 + 2 align gain + gain², where a bounds "
            "the growth of the error.",
            "b1029bcf848f604e", ("lyapunov_prune.bounds.checkers.preln_contraction_sufficient",), "checker"),
    Theorem("10", "preln_layer_contracts", "Alignment", "structural sensitivity §4.2, Thm 10",
            "Theorem 10 for vectors: state, sublayer output, error, and what the sublayer makes of "
            "the error.",
            "2e1a58616e9ef64b", ("lyapunov_prune.bounds.checkers.preln_contraction_sufficient",), "checker"),
    Theorem("11", "nonlinear_composition_bound", "Propagation", "structural sensitivity §4.2, Thm 11",
            "Two layers with stretching K₀, K₁ and local errors δ₀, δ₁: e₂ ≤ K₁ K₀ e₀ + K₁ δ₀ + δ₁.",
            "3df47b9daad7e9d2", ("lyapunov_prune.bounds.checkers.trajectory_error_le",), "checker"),
    Theorem("12", "contraction_tightens_lipschitz", "Propagation", "structural sensitivity App. B, Thm 12",
            "Multiplying the stretching factors by ρ between 0 and 1 never raises the composed bound.",
            "df4937b428aefb9f",
            unused="it compares two bounds and says nothing of an error: K is measured after whatever the layer "
            "contracts, so that a factor ρ before it would count the contraction twice"),
    Theorem(None, "error_recurrence", "Propagation", "structural sensitivity §4.2, eq. (1)",
            "Layer by layer, the error between two trajectories is at most K times the one before "
            "plus the local error δ.",
            "30896ddf128cc24d"),
    Theorem(None, "trajectory_error_le", "Propagation", "structural sensitivity §4.2, eq. (1)",
            "Any number of layers: the error between two trajectories is at most the composed bound.",
            "2ad62294ff68b5a8", ("lyapunov_prune.bounds.checkers.trajectory_error_le",), "checker"),
    Theorem(None, "composedBound_eq_sum", "Propagation", "structural sensitivity §4.2, eq. (1)",
            "The composed bound in closed form: each layer's own error times the stretching of all "
            "later layers.",
            "72a4980c9ef609a5"),
    Theorem(None, "composedBound_mono", "Propagation", "structural sensitivity §4.2, eq. (1)",
            "The composed bound is monotone in the stretching, the local errors and the first error.",
            "ab86c7a9bf1372a4"),
    Theorem(None, "rho_eq_error_growth_div_state_growth", "Contraction", "structural sensitivity §6.2",
            "ρ is the growth of the error energy over the growth of the state energy.",
            "bd52cecf55b6d29c", ("lyapunov_prune.profiles.contraction.measure_contraction",), "measurement"),
    Theorem(None, "relative_energy_telescope", "Contraction", "structural sensitivity §6.2",
            "The product of the first n factors ρ is the end-to-end ratio V_n / V_0.",
            "a42539621c105ac8", ("lyapunov_prune.profiles.contraction.measure_contraction",), "measurement"),
    Theorem(None, "relative_energy_le_pow", "Contraction", "structural sensitivity §6.2",
            "If V_{k+1} ≤ γ V_k for every layer, then V_n ≤ γⁿ V_0.",
            "adfd4228563f212f"),
    Theorem(None, "spectral_residual_not_antitone", "Approximation", "structural sensitivity §3, refuted",
            "Keeping more entries can raise the operator norm of the residual (a 2 × 2 counterexample).",
            "af1e89fc9134c2a6"),
    Theorem(None, "sum_sq_residual_antitone", "Approximation", "structural sensitivity §3, corrected",
            "Keeping more entries never raises the Frobenius norm of the residual.",
            "51ba21ee34efb823"),
    Theorem(None, "opNorm_le_of_sq_le", "Approximation", "beyond the papers",
            "If ‖A x‖² ≤ s² ‖x‖² for all x (s² I - AᵀA positive semidefinite), then ‖A‖ ≤ s.",
            "34e54cd9b1ff68c0", ("lyapunov_prune.linalg.certified_norm",), "checker"),
    Theorem(None, "error_le_of_certified_norm", "Approximation", "beyond the papers",
            "Any upper bound s of ‖W - S‖ may stand in for it: ‖W x - S x‖ ≤ s ‖x‖.",
            "c529821b3fe204ed", ("lyapunov_prune.bounds.checkers.sparse_activation_bound",), "checker"),
    Theorem(None, "no_false_alarm", "Checker", "beyond the papers",
            "If the bound holds, a check that allows for the rounding u + v raises no alarm.",
            "9dc7e438354451a1", ("lyapunov_prune.bounds.check.check_bounds", "lyapunov_prune.bounds.check.check_grid"),
            "checker"),
    Theorem(None, "violation_is_real", "Checker", "beyond the papers",
            "A violation found with that allowance is a violation of the true bound.",
            "3b16c0ac5dbe668e", ("lyapunov_prune.bounds.check.check_bounds", "lyapunov_prune.bounds.check.check_grid"),
            "checker"),
    Theorem(None, "check_is_sound", "Checker", "beyond the papers",
            "A check passed with the allowance on the other side shows the true bound, for this input.",
            "35ebb7d4baba2ef3"),
    Theorem(None, "bound_of_upper_bound", "Checker", "beyond the papers",
            "A bound computed too large stays a bound.",
            "7ce5784d41a33594", ("lyapunov_prune.linalg.certified_norm",), "checker"),
    Theorem(None, "argmax_unchanged", "Decision", "beyond the papers",
            "If every logit j moves by at most d_j and i leads every j by more than d_i + d_j, i "
            "stays the argmax.",
            "3bd9b20a41d895b3", ("lyapunov_prune.bounds.decision.argmax_unchanged_of_state_error",), "checker"),
    Theorem(None, "argmax_unchanged_of_row_difference", "Decision", "beyond the papers",
            "If the state moves by at most r and i leads every j by more than ‖w_i - w_j‖ r, i stays "
            "the argmax.",
            "f91fe30212223a7b", ("lyapunov_prune.bounds.decision.argmax_unchanged_of_row_difference",), "checker"),
    Theorem(None, "argmax_unchanged_of_state_error", "Decision", "beyond the papers",
            "If the state moves by at most r and i leads every j by more than (‖w_i‖ + ‖w_j‖) r, i "
            "stays the argmax.",
            "85446140d03901eb", ("lyapunov_prune.bounds.decision.argmax_unchanged_of_state_error",), "checker"),
    Theorem(None, "kl_softmax", "Probability", "representation hierarchies, Thm 3",
            "KL(p‖q) = log E_p[exp d] - E_p[d] when the logits change by d, exactly.",
            "be09dffcc5034f75"),
    Theorem(None, "kl_softmax_nonneg", "Probability", "representation hierarchies, Thm 3",
            "That divergence is at least zero.",
            "405eb0e7559a43cb"),
    Theorem(None, "kl_softmax_le_range", "Probability", "representation hierarchies, Thm 3",
            "That divergence is at most max d - min d.",
            "78f0f75a30bcca88", ("lyapunov_prune.bounds.probability.kl_softmax_le_range",), "checker"),
    Theorem(None, "kl_softmax_le_variance", "Probability", "representation hierarchies, Thm 3",
            "KL(p‖q) ≤ (1/2 + 2c/9) Var_p(d) when |d_i - E_p[d]| ≤ c ≤ 1: Var_p(d)/2 and its remainder.",
            "9770f0f65f975016", ("lyapunov_prune.bounds.probability.kl_softmax_le_variance",), "checker"),
    Theorem(None, "argmax_of_noise_lt_half_gap", "Decision", "boundary depth pruning, Thm 3",
            "A predictor with noise below half the gap between the best and the rest picks the best.",
            "13816586930a00a5", ("lyapunov_prune.bounds.choice.argmax_of_noise_lt_half_gap",), "checker"),
    Theorem(None, "argmax_add_const", "Decision", "boundary depth pruning, Thm 3",
            "A constant bias of the predictor changes no comparison.",
            "fa4bebce10ff40b0", ("lyapunov_prune.bounds.choice.regret_of_argmax_le",), "checker"),
    Theorem(None, "regret_of_argmax_le", "Decision", "boundary depth pruning, Thm 3",
            "What a predictor with that noise picks is within twice the noise of the best, gap or no gap.",
            "4a232892799fdb75", ("lyapunov_prune.bounds.choice.regret_of_argmax_le",), "checker"),
    Theorem(None, "merged_projection", "Merging", "boundary depth pruning",
            "Two affine maps in a row are one affine map, exactly.",
            "515cf8673acff81d", ("lyapunov_prune.bounds.checkers.merged_projection",), "checker"),
    Theorem(None, "activation_replacement_bound", "Merging", "boundary depth pruning",
            "Replacing an activation costs at most ‖W₂‖ times the change of the hidden units.",
            "bcc4689a08e5f23c", ("lyapunov_prune.bounds.checkers.activation_replacement_bound",), "checker"),
    Theorem(None, "opNorm_merged_le", "Merging", "boundary depth pruning",
            "The merged matrix is no larger than the product: ‖W₂ W₁‖ ≤ ‖W₂‖ ‖W₁‖.",
            "191d872e3e68c2bb", ("lyapunov_prune.bounds.checkers.opNorm_merged_le",), "checker"),
)
