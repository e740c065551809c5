"""The schedules by name: a new one is a file in `schedules` and a row here."""

from __future__ import annotations

from lyapunov_prune.allocation.schedule import Schedule
from lyapunov_prune.registry import Registry

SCHEDULES = Registry[Schedule]("schedule", "lyapunov_prune.allocation.schedules", ("atp", "uniform"))
