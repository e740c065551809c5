"""Checkpoints from the hub, from its cache or the network."""

from __future__ import annotations

import re
from pathlib import Path

from lyapunov_prune.errors import LyapunovPruneError, first_line, like_named
from lyapunov_prune.models.cache import BUILTIN

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Files of a checkpoint besides weights; none of these can hold code.
_FILES = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "README.md"]
_FILES += ["LICENSE*", "LICENCE*", "NOTICE*"]
_PARTS = ["[0-9]_*/*.json", "[0-9]_*/*.safetensors"]  # parts of an embedding model, listed in its modules.json


def download(name: str, offline: bool) -> Path:
    """The folder of a hub model, from the cache or the network; only safetensors weights are downloaded."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=_FILES, ignore_patterns=["*/*"], local_files_only=offline)
        if Path(folder, "modules.json").is_file():
            snapshot_download(name, allow_patterns=_PARTS, local_files_only=offline)
        return Path(folder)
    except Exception as error:  # disk errors, the hub's own, a proxy's, those of the HTTP library
        raise LyapunovPruneError(_diagnosis(name, error, offline)) from None


def _diagnosis(name: str, error: Exception, offline: bool) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, RepositoryNotFoundError):
        return (
            f"the hub has no model {name} that you may read{like_named(name)}; check the name, or log in with "
            "`hf auth login`"
        )
    if isinstance(error, LocalEntryNotFoundError):
        asked = "offline was given" if offline else "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        return (
            f"{name} is neither a local folder{like_named(name)} nor in the hub cache, and "
            f"{asked or 'the hub could not be reached'}; download it first, give a folder, or use {BUILTIN}"
        )
    if isinstance(error, HFValidationError):
        return f"no model at {name}, and it is no hub id ({first_line(error)}); give a folder, a hub id or {BUILTIN}"
    return f"the hub did not provide {name}: {first_line(error)}; try again later"
