"""The schedules by name: a new one is a file in `schedules` and a row here."""

from __future__ import annotations

from lyapunov_prune.allocation.schedule import Schedule
from lyapunov_prune.registry import Registry

_SCHEDULES = "lyapunov_prune.allocation.schedules"
SCHEDULES = Registry[Schedule](
    "schedule",
    {
        "alpha-pruning": f"{_SCHEDULES}.alpha_pruning:AlphaPruning",
        "atp": f"{_SCHEDULES}.atp:ATP",
        "atp-search": f"{_SCHEDULES}.atp_search:ATPSearch",
        "bits": f"{_SCHEDULES}.bits:Bits",
        "bits-amplification": f"{_SCHEDULES}.bits_amplification:BitsAmplification",
        "bits-ends": f"{_SCHEDULES}.bits_ends:BitsEnds",
        "bits-kl": f"{_SCHEDULES}.bits_kl:BitsKL",
        "bits-rho": f"{_SCHEDULES}.bits_rho:BitsRho",
        "guidelines": f"{_SCHEDULES}.guidelines:Guidelines",
        "lyapunov": f"{_SCHEDULES}.lyapunov:Lyapunov",
        "lyapunov-budget": f"{_SCHEDULES}.lyapunov_budget:LyapunovBudget",
        "owl": f"{_SCHEDULES}.owl:OWL",
        "uniform": f"{_SCHEDULES}.uniform:Uniform",
    },
)
