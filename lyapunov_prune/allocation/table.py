"""The schedules by name: what each does, where it comes from, what it must know. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class Schedule(NamedTuple):
    """What a schedule does in a line, its reference, the measurement that it `needs`, and its keyword parameters."""

    help: str
    reference: str
    needs: str | None = None  # batch or profile
    parameters: tuple[str, ...] = ()


SCHEDULES: dict[str, Schedule] = {
    "alpha-pruning": Schedule(
        "layers whose spectra have the heavier tails stay denser",
        "Lu et al., NeurIPS 2024, arXiv:2410.10912, §3.2",
        parameters=("tau",),
    ),
    "atp": Schedule(
        "in arithmetic progression, the first layer densest",
        "Huang et al., ICML 2025, arXiv:2502.14770",
        parameters=("beta",),
    ),
    "bits": Schedule(
        "wide weights for the layers whose errors grow most (rtn)",
        "structural sensitivity, §6.2",
        "profile",
        ("low", "high"),
    ),
    "guidelines": Schedule(
        "early MLP inputs whole, keys and values sparser, a ceiling",
        "structural sensitivity, §6.4",
        parameters=("ceiling", "extra", "protected"),
    ),
    "lyapunov": Schedule(
        "least error at the output by a quadratic model",
        "structural sensitivity, §6.4 and Appendix E",
        "profile",
        ("least", "most"),
    ),
    "lyapunov-budget": Schedule(
        "every layer adds the same error at the output",
        "structural sensitivity, §6.4",
        "profile",
        ("reading",),
    ),
    "owl": Schedule(
        "layers with more outliers among their Wanda scores stay denser",
        "Yin et al., ICML 2024, arXiv:2310.05175, §3.2",
        "batch",
        ("outlier", "width"),
    ),
    "uniform": Schedule("every matrix the same", "control"),
}
