"""The command that shows and empties the cache of dequantised models."""

from __future__ import annotations

from typing import Annotated

from lyapunov_prune.cli.options import what_option
from lyapunov_prune.cli.terminal import say


def cache(
    *, clear: Annotated[bool, what_option("--clear", help="Delete all of it; what is needed is made again.")] = False
) -> None:
    """Show or empty the cache, which holds a dequantised copy of every .gguf file that was given as MODEL.

    The cache is the folder LYAPUNOV_PRUNE_CACHE, or else lyapunov-prune in XDG_CACHE_HOME or ~/.cache. It holds at most
    LYAPUNOV_PRUNE_CACHE_GB (20) of such models and drops the least recently used first. The built-in model is also
    stored there and does not count.
    """
    from lyapunov_prune.models.cache import cache_folder, cache_limit, cached, clear_cache

    held, limit = cached(), cache_limit()
    if clear:
        clear_cache()
    size = sum(each.size for each in held)
    say(f"{cache_folder()}: {size / 1e9:.2f} GB {'deleted' if clear else f'of at most {limit / 1e9:g}'}")
    for each in held:
        say(f"{each.size / 1e9:8.2f} GB  last used {each.used.astimezone():%Y-%m-%d %H:%M}  {each.source}")
