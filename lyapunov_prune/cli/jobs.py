"""Where commands keep unfinished work, and which process ends them."""

from __future__ import annotations

from pathlib import Path

import typer

from lyapunov_prune.progress import is_main, several

JOBS = Path("runs") / "jobs"


def first_goes_on() -> None:
    """Of the processes of `accelerate launch` the first goes on by itself, and writes and prints; the others end."""
    if not is_main():
        raise typer.Exit
    if several():
        from lyapunov_prune.models.launched import stay_alone

        stay_alone()


def jobs_folder() -> Path:
    """Where every command keeps unfinished work, by its settings; the command `cache` lists it.

    Raises LyapunovPruneError, before anything is loaded, where nothing can be written.
    """
    from lyapunov_prune.results.files import require_writable

    require_writable(JOBS, "run it from a folder that you may write")
    return JOBS
