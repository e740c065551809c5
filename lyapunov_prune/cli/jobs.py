"""Where commands keep unfinished work."""

from __future__ import annotations

from pathlib import Path

JOBS = Path("runs") / "jobs"


def jobs_folder() -> Path:
    """Where every command keeps unfinished work, by its settings; the command `cache` lists it.

    Raises LyapunovPruneError, before anything is loaded, where nothing can be written.
    """
    from lyapunov_prune.results.files import require_writable

    require_writable(JOBS, "run it from a folder that you may write")
    return JOBS
