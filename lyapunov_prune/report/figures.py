"""The figures of one result, shown by a notebook or saved to a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lyapunov_prune.budget.spent import Spent
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.task_scores import TaskScores
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.report.compression import sizes_figure
from lyapunov_prune.report.evaluation import tasks_figure
from lyapunov_prune.report.page import SECTIONS
from lyapunov_prune.report.profiles import contraction_figure
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.result import Result


class Figures(dict[str, str]):
    """SVG texts by name."""

    def __repr__(self) -> str:
        return f"figures {', '.join(self)}; save(FOLDER) writes them, and a notebook shows them"

    def _repr_html_(self) -> str:
        return Markup("\n").join(Markup(svg) for svg in self.values())

    def save(self, folder: str | Path) -> list[Path]:
        """Write `NAME.svg` of each into `folder`; returns the paths."""
        return [write_whole(Path(folder) / f"{name}.svg", svg) for name, svg in self.items()]


# Of results that are a part of another, or that two sections of the page draw.
_OWN: dict[type[Result], Callable[[Any], dict[str, str]]] = {
    ContractionProfile: lambda r: {"contraction": contraction_figure(r)},
    Spent: lambda r: {"sizes": sizes_figure(r)},
    TaskScores: lambda r: {"tasks": tasks_figure(r)},
}


def figures_of(result: Result) -> Figures:
    """The figures that the page draws of a result; raises LyapunovPruneError for a class that has none."""
    if type(result) in _OWN:
        return Figures(_OWN[type(result)](result))
    for section in SECTIONS:
        if type(result) is section.kind and section.part(result) is result and (drawn := section.draw(result)):
            return Figures(drawn)
    raise LyapunovPruneError(f"{type(result).__name__} has no figure; print it, or take its to_frame()")
