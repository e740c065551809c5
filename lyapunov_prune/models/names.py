"""What the name of a model can be: a folder, a GGUF file, the built-in model, or an id of the hub; without torch."""

from __future__ import annotations

import re
from pathlib import Path

from lyapunov_prune.errors import LyapunovPruneError, did_you_mean, like_named
from lyapunov_prune.models.cache import BUILTIN

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CONFIGS = ("config.json", "adapter_config.json")


def require_model(name: str) -> None:
    """Raise LyapunovPruneError if no model can be at `name`; of a folder its config is sought, and nothing is read."""
    path = Path(name)
    remedy = f"give a folder, a .gguf file, a hub id or {BUILTIN}"
    if name and name != BUILTIN and path.is_dir():
        if not any((path / config).exists() for config in _CONFIGS):
            raise LyapunovPruneError(f"{name} holds no model, for it has no config.json; {remedy}")
    elif name.endswith(".gguf"):
        if not path.exists():
            raise LyapunovPruneError(f"no file {name}{like_named(path)}; {remedy}")
    elif name != BUILTIN:
        meant = "" if "/" in name else did_you_mean(name, [BUILTIN])  # asking the hub may take half a minute
        if path.exists() or meant or name.startswith((".", "/", "~")) or not HUB_ID.fullmatch(name):
            raise LyapunovPruneError(f"no model at {name or repr(name)}{meant or like_named(path)}; {remedy}")
