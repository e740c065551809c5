"""The schedules by name: what each does, where it comes from, what it must know. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lyapunov_prune.arguments import fits, is_finite
from lyapunov_prune.errors import LyapunovPruneError


class Schedule(NamedTuple):
    """What a schedule does in a line, its reference, the measurement that it `needs`, and its keyword parameters.

    Parameters are numbers, but for those in `checked`, of which the schedule itself says what they can be.
    """

    help: str
    reference: str
    needs: str | None = None  # batch, profile or score
    parameters: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()


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
    "atp-search": Schedule(
        "atp at the slope of least loss on held-out calibration windows",
        "Huang et al., ICML 2025, arXiv:2502.14770",
        "score",
        ("trials",),
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
        checked=("ceiling",),
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


def require_parameters(schedule: str, parameters: Mapping[str, Any]) -> None:
    """Raise LyapunovPruneError for an unknown schedule, a parameter it does not have, and one that is no number."""
    if schedule not in SCHEDULES:
        raise LyapunovPruneError(f"unknown schedule {schedule!r}; give one of {', '.join(SCHEDULES)}")
    known = SCHEDULES[schedule]
    for name, value in parameters.items():
        if name not in known.parameters:
            has = f"it has {', '.join(known.parameters)}" if known.parameters else "it has none"
            raise LyapunovPruneError(f"schedule {schedule} has no parameter {name!r}; {has}")
        if name not in known.checked and not (fits(value, float) and is_finite(value)):
            raise LyapunovPruneError(f"{name} of schedule {schedule} is {value!r}; give a finite number")
