"""What the structural-sensitivity paper prints in its Tables 1 to 4 and 6 and in Appendix B, and the largest ρ that its
abstract calls such; what the paper on representation hierarchies prints in its Table 1.

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
    bounds are from §6.1, `growth` are mean, largest and worst norm growth K of Appendix B.
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
    growth: tuple[float, float, float] | None = None


MODELS = (
    Row(
        "GPT-2 Small",
        "117M",
        12,
        768,
        "transformer",
        26.53,
        (11, 11),
        0.96,
        0.50,
        0,
        120,
        None,
        14_040,
        (101.8, 112.6, 126.0),
    ),
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
        (55.7, 60.7, 120.0),
    ),
    Row("LFM2-2.6B", "2.6B", 30, 2560, "hybrid", 34.15, (19, 29), 1.12, 0.80, None, 7),
    Row(
        "Mistral-7B",
        "7.2B",
        32,
        4096,
        "transformer",
        6.31,
        (17, 31),
        1.14,
        0.95,
        0,
        11,
        (8.4, 6.15),
        2_899_968,
        (259.3, 287.5, 528.0),
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

# Table 4, LLaMA-2-7B: layers removed and α to the layers, perplexity, mean accuracy in per cent.
BLENDS: dict[tuple[int, str], tuple[str, float, float]] = {
    (4, "0"): ("24, 26 to 28", 8.77, 68.2),
    (4, "0.25"): ("24, 26, 27, 30", 9.74, 67.8),
    (4, "0.5 to 1"): ("10, 12, 13, 30", 8.63, 65.1),
    (8, "0"): ("21, 23 to 29", 25.3, 59.9),
    (8, "0.5"): ("10 to 14, 24, 26, 30", 14.2, 60.0),
    (8, "1"): ("7, 9 to 14, 30", 16.2, 58.3),
}
# Table 6, LLaMA-2-7B, whose perplexity is 5.47: of 32 layers skipped, by the paper and by others' searches.
SKIPPED = {
    2: {"rho": 6.13, "bi": 6.30, "optimal": 6.02, "from-end": 6.99},
    4: {"rho": 7.92, "bi": 8.45, "optimal": 7.01, "from-end": 9.96},
    6: {"rho": 10.67, "bi": 15.47, "optimal": 8.75, "from-end": 15.47},
    8: {"rho": 14.62, "bi": 23.75, "optimal": 11.61, "from-end": 25.41},
}
SEARCHED = {"SLEB": ("20 %", 9.14), "BlockPruner": ("22 %", 11.51)}  # of what is removed, perplexity
# §6.5: layers of LLaMA-2-7B that can go alone at little regret, and those tested. The limit is lost in our copy.
REMOVABLE = 21, 31

# Representation hierarchies, Table 1: the whole model, without eight attentions, without eight MLPs. (a) E5-Mistral,
# (b) Mistral-7B-Instruct.
RETRIEVAL = {
    "Arguana": (60.9, 54.7, 58.6),
    "Climate-FEVER": (36.8, 31.9, 38.4),
    "DBPedia": (47.9, 43.6, 44.1),
    "FEVER": (87.6, 82.9, 88.7),
    "FiQA": (56.4, 50.9, 52.8),
    "HotpotQA": (74.9, 66.8, 74.2),
    "NFCorpus": (38.1, 35.4, 36.9),
    "NQ": (66.3, 56.1, 65.4),
    "Quora": (88.6, 86.5, 88.2),
    "SCIDOCS": (16.2, 12.4, 14.7),
    "SciFact": (75.8, 71.4, 73.6),
    "TREC-COVID": (85.9, 84.3, 79.6),
    "Touche-2020": (22.9, 18.1, 18.7),
    "average": (58.9, 53.4, 56.8),
}
MULTIPLE_CHOICE = {
    "BoolQ": (85.9, 86.0, 78.2),
    "MMLU": (62.1, 62.0, 59.1),
    "OpenBookQA": (47.0, 46.8, 41.2),
    "RTE": (72.9, 74.0, 72.1),
    "WinoGrande": (78.8, 80.0, 71.1),
    "average": (69.3, 69.8, 64.3),
}
GENERATION = {
    "GSM8K": (48.4, 36.2, 0.0),
    "HumanEval": (4.9, 0.0, 0.0),
    "MBPP": (13.8, 0.4, 0.0),
    "NarrativeQA": (16.3, 9.6, 2.0),
    "NQ-Open": (27.9, 20.9, 2.0),
    "average": (22.3, 13.2, 0.8),
}

# From the abstract of the second version, arXiv:2603.20991v2 of 7 May 2026, whose numbers our copy has lost: largest
# over smallest regret of a component by naive pruning and, over the models, by Wanda; how many times lower perplexity
# ρ leaves than Block Influence.
SPREAD_NAIVE, SPREAD_WANDA = 600.0, (3.0, 7.0)
RHO_OVER_BI = 1.6
