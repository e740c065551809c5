"""The command that shows and empties the cache of dequantised models, and unfinished work."""

from __future__ import annotations

from typing import Annotated

from lyapunov_prune.cli.jobs import JOBS
from lyapunov_prune.cli.options import what_option
from lyapunov_prune.cli.terminal import say


def cache(
    *, clear: Annotated[bool, what_option("--clear", help="Delete all of it; what is needed is made again.")] = False
) -> None:
    """Show or delete what is kept: a dequantised copy of every .gguf file that was given as MODEL, and unfinished work.

    The cache is the folder LYAPUNOV_PRUNE_CACHE, or else lyapunov-prune in XDG_CACHE_HOME or ~/.cache. It holds at most
    LYAPUNOV_PRUNE_CACHE_GB (20) of such models and drops the least recently used first. The built-in model is also
    stored there and does not count. Measurements and unfinished work are in runs/jobs of the current folder: each goes
    by its settings, and commands that ask for the same measurement share it.
    """
    from lyapunov_prune.models.cache import cache_folder, cache_limit, cached, clear_cache
    from lyapunov_prune.models.size import told_bytes
    from lyapunov_prune.results.claim import clear_unfinished, unfinished

    held, limit, jobs = cached(), cache_limit(), unfinished(JOBS)
    if clear:
        clear_cache()
        clear_unfinished(JOBS)
    size = sum(each.size for each in held)
    say(f"{cache_folder()}: {size / 1e9:.2f} GB {'deleted' if clear else f'of at most {limit / 1e9:g}'}")
    for each in held:
        say(f"{each.size / 1e9:8.2f} GB  last used {each.used.astimezone():%Y-%m-%d %H:%M}  {each.source}")
    if jobs:
        taken = told_bytes(sum(each.size for each in jobs))
        say(f"{JOBS}: {taken} of unfinished work and measurements{' deleted' if clear else ''}")
    for job in jobs:
        used = f"{job.used.astimezone():%Y-%m-%d %H:%M}"
        say(f"{told_bytes(job.size):>11}  last used {used}  {job.kind}, by: lyapunov-prune {job.command}")
