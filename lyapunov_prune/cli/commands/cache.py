"""The command that shows and empties the cache of dequantised models."""

from __future__ import annotations

from typing import Annotated

from lyapunov_prune.cli.options import Json, what_option
from lyapunov_prune.cli.terminal import print_json, say


def cache(
    *,
    clear: Annotated[bool, what_option("--clear", help="Delete all of it; what is needed is made again.")] = False,
    as_json: Json = False,
) -> None:
    """Show or empty the cache, in which every .gguf file given as MODEL is dequantised once, by its content.

    It is the folder LYAPUNOV_PRUNE_CACHE, or else lyapunov-prune in XDG_CACHE_HOME or ~/.cache, and holds at most
    LYAPUNOV_PRUNE_CACHE_GB (20) of such models: those go first that were not used for longest. The built-in model lies
    there too and does not count.
    """
    from lyapunov_prune.models.cache import cache_folder, cache_limit, cached, clear_cache

    held, limit = cached(), cache_limit()
    if clear:
        clear_cache()
    if as_json:
        models = [
            {"source": each.source, "folder": str(each.folder), "bytes": each.size, "used": each.used.isoformat()}
            for each in held
        ]
        print_json({"folder": str(cache_folder()), "limit": limit, "models": models, "cleared": clear})
        return
    size = sum(each.size for each in held)
    say(f"{cache_folder()}: {size / 1e9:.2f} GB {'deleted' if clear else f'of at most {limit / 1e9:g}'}")
    for each in held:
        say(f"{each.size / 1e9:8.2f} GB  last used {each.used.astimezone():%Y-%m-%d %H:%M}  {each.source}")
