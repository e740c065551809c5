"""What the structural-sensitivity paper prints in its Tables 1 to 4, and the largest ρ that its abstract calls such.

Table 3 is at four layers removed; eight are from Table 4 (LLaMA-2-7B). The degradations at 50 % are from the abstract
printed in the first version, arXiv:2603.20991v1 of 22 March 2026 ("Structural Sensitivity in Compressed Transformers:
Error Propagation, Lyapunov Stability, and Formally Verified Bounds"): our copy, of the second version, lacks them.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A model of Tables 1 and 2; `violations` None where the paper checked no bounds.

    `degradation` is perplexity over dense at 50 % sparsity, None where the first version's abstract gives none;
    `calibrated` is the perplexity of Wanda with calibration and of the dense model beside it (Table 7); `checks` of
    bounds are from §6.1, `growth` is the mean norm growth K of Appendix B.
    """

    name: str
    parameters: str
    layers: int
    width: int
    architecture: str
    perplexity: float
    contracting: tuple[int, int]
    rho: float
    threshold: float
    violations: int | None
    degradation: float | None
    calibrated: tuple[float, float] | None = None
    checks: int | None = None
    growth: float | None = None


MODELS = (
    Row("GPT-2 Small", "117M", 12, 768, "transformer", 26.53, (11, 11), 0.96, 0.50, 0, 120, None, 14_040, 101.8),
    Row("GPT-2 Medium", "345M", 24, 1024, "transformer", 19.90, (21, 23), 2.05, 0.50, 0, None),
    Row(
        "Qwen3.5-2B",
        "1.9B",
        24,
        2048,
        "transformer",
        13.54,
        (13, 23),
        1.11,
        0.60,
        0,
        None,
        (26.0, 13.5),
        1_744_896,
        55.7,
    ),
    Row("LFM2-2.6B", "2.6B", 30, 2560, "hybrid", 34.15, (19, 29), 1.12, 0.80, None, 7),
    Row(
        "Mistral-7B", "7.2B", 32, 4096, "transformer", 6.31, (17, 31), 1.14, 0.95, 0, 11, (8.4, 6.15), 2_899_968, 259.3
    ),
    Row("Qwen3-8B", "8B", 36, 4096, "transformer", 10.38, (18, 35), 1.33, 0.80, None, 42922),
)
# Model, criterion, layers removed: perplexity, mean accuracy in per cent (None: not printed).
REMOVALS: dict[tuple[str, str, int], tuple[float, float | None]] = {
    ("LLaMA-2-7B", "dense", 0): (5.47, 72.3),
    ("LLaMA-2-7B", "rho", 4): (8.6, 65.1),
    ("LLaMA-2-7B", "bi", 4): (8.8, 68.2),
    ("LLaMA-2-7B", "blend", 4): (8.6, 65.1),
    ("LLaMA-2-7B", "from-end", 4): (9.7, None),
    ("LLaMA-2-7B", "rho", 8): (16.2, 58.3),
    ("LLaMA-2-7B", "bi", 8): (25.3, 59.9),
    ("LLaMA-2-7B", "blend", 8): (14.2, 60.0),
    ("Mistral-7B", "rho", 4): (9.0, 70.5),
    ("Mistral-7B", "bi", 4): (8.2, 72.1),
    ("Mistral-7B", "blend", 4): (8.4, 71.8),
    ("Mistral-7B", "from-end", 4): (62.3, 65.8),
    ("Mistral-7B", "random", 4): (52.5, 40.7),
    ("Qwen3.5-2B", "rho", 4): (33.4, None),
    ("Qwen3.5-2B", "bi", 4): (46.2, None),
    ("Qwen3.5-2B", "from-end", 4): (2467.0, None),
}

# From the abstract of the second version, arXiv:2603.20991v2 of 7 May 2026, whose numbers our copy has lost: largest
# over smallest regret of a component by naive pruning and, over the models, by Wanda; how many times lower perplexity
# ρ leaves than Block Influence.
SPREAD_NAIVE, SPREAD_WANDA = 600.0, (3.0, 7.0)
RHO_OVER_BI = 1.6
