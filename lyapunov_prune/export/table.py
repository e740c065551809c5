"""The formats by name: a new one is a file in `formats` and a row here. Imports neither torch nor numpy."""

from __future__ import annotations

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.format import Format
from lyapunov_prune.registry import Registry

FORMATS = Registry[Format](
    "format",
    "lyapunov_prune.export.formats",
    (
        "plain",
        "compact",
        "gguf",
        "packed",
    ),
)


def formats_of(command: str) -> dict[str, type[Format]]:
    """The formats that `prune`, `compress` or `export` writes."""
    says = {"prune": "card", "compress": "units", "export": "exports"}[command]
    return {name: known for name, known in FORMATS.items() if getattr(known, says)}


def require_streamed_format(name: str, command: str) -> None:
    """Raise LyapunovPruneError for a format that `command` can write only with the model in memory."""
    if command not in FORMATS[name].streamed:
        others = ", ".join(other for other, known in FORMATS.items() if command in known.streamed)
        raise LyapunovPruneError(f"format {name} needs the model in memory; give --format {others}, or load it whole")
