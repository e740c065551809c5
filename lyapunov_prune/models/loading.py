"""`load`: a model from a hub id, a local folder, a GGUF file, or the built-in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError, did_you_mean, first_line, like_named
from lyapunov_prune.models.adapters import base_of, holds_adapters, merge_adapters
from lyapunov_prune.models.cache import BUILTIN
from lyapunov_prune.models.compact import family_of
from lyapunov_prune.models.decoder import Decoder, wrap
from lyapunov_prune.models.device import resolve_device
from lyapunov_prune.models.dispatched import SPREAD
from lyapunov_prune.models.families import CAUSAL_BY_MASK, JUDGED
from lyapunov_prune.models.from_folder import load_bare, load_folder, quiet
from lyapunov_prune.models.gguf import builtin_folder, load_gguf
from lyapunov_prune.models.names import require_model
from lyapunov_prune.models.plain import require_weights
from lyapunov_prune.models.structure import require_causal, settle
from lyapunov_prune.progress import status, warn

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@checked
def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    offline: bool = False,
    text_only: bool = False,
) -> Decoder:
    """Load a decoder and its tokenizer, in eval mode; returns the handle that every function accepts as a model.

    `name` is a hub id, a local folder, a `.gguf` file, or `smollm2-135m`. `dtype` is as in torch (`float32`,
    `bfloat16`, …); None keeps the checkpoint's. `device` is as in torch, `auto` for the GPU if there is one, or
    `spread` for layers over all GPUs, as accelerate balances them. Only safetensors and GGUF weights are read, and no
    code from a checkpoint is run. LoRA adapters in a folder of their own are added to the weights of their base model,
    which a line on stderr names.

    A decoder inside a multimodal model is loaded with the whole model, so that a checkpoint made of it still reads
    pictures. With `text_only` only the text model is loaded, and a line on stderr names what is left out.

    Raises LyapunovPruneError, with the remedy, for anything that cannot be loaded whole.
    """
    wanted = known_dtype(dtype)
    name = str(name)
    place = SPREAD if device == SPREAD else resolve_device(str(device))
    options: dict[str, Any] = {"dtype": wanted or "auto", "device_map": place}
    with status(f"loading {name}"):
        folder = None if name.endswith(".gguf") else checkpoint_folder(name, offline=offline)
        adapted = folder is not None and holds_adapters(folder)
        if adapted and place == SPREAD:
            raise LyapunovPruneError(f"{name} holds adapters, which are merged into a decoder on one device; give that")
        if folder is None:
            loaded = load_gguf(Path(name), options | {"dtype": wanted or torch.float32})
        elif adapted:
            loaded = _load_merged(folder, options, offline, text_only)
        else:
            loaded = load_folder(folder, options, text_only=text_only)
        loaded.model.config._name_or_path = name
        settle(loaded.model)
        require_causal(loaded.model)
    return loaded


def checkpoint_folder(name: str, *, offline: bool = False) -> Path:
    """The folder of the checkpoint `name`, downloaded from the hub if necessary.

    Raises LyapunovPruneError, with the remedy, if there is none.
    """
    if name == BUILTIN:
        return builtin_folder()
    if name and Path(name).is_dir():
        return Path(name)
    require_model(name)
    return download(name, offline)


def load_outline(
    folder: Path, name: str | Path, dtype: torch.dtype | None = None, *, text_only: bool = False
) -> Decoder:
    """A model on the `meta` device: config, names and shapes, while all weights stay on disk.

    Raises LyapunovPruneError for what `load` would refuse, and for a decoder that would have to be run to be judged:
    one of a family that is not in `JUDGED`, or one that may be an encoder. Without weights causality cannot be tested,
    so the config must say that it is a decoder, or its attention that it is causal.
    """
    return _judged(load_folder(folder, {"dtype": dtype or "auto", "device_map": "meta"}, text_only=text_only), name)


def load_bare_outline(folder: Path, name: str | Path) -> Decoder:
    """`load_outline` of a quantised checkpoint from its config alone, with plain matrices in place of quantised ones.

    Raises LyapunovPruneError as `load_outline` does, but does not check which tensors the files hold.
    """
    return _judged(load_bare(folder), name)


def _judged(outline: Decoder, name: str | Path) -> Decoder:
    """Set the outline's name; raises LyapunovPruneError for a decoder that would have to be run to be judged."""
    config = outline.structure.config
    causal = any(getattr(module, "is_causal", False) for module in outline.structure.layers.modules())
    why = ""
    family = family_of(config)
    if family not in JUDGED:
        why = f"the family {family} has not passed its control, see docs/families.md"
    elif not (causal or getattr(config, "is_decoder", True) or family in CAUSAL_BY_MASK):
        why = "its config calls it an encoder"
    if why:
        raise LyapunovPruneError(
            f"{type(outline.model).__name__} cannot be judged without running it ({why}); take it in memory"
        )
    outline.model.config._name_or_path = str(name)
    return outline


def _load_merged(folder: Path, options: dict[str, Any], offline: bool, text_only: bool) -> Decoder:
    name = base_of(folder)
    base = load_folder(checkpoint_folder(name, offline=offline), options, text_only=text_only)
    require_weights(base.model, "unquantised")
    with quiet():
        merged = wrap(merge_adapters(base.model, folder).eval(), base.tokenizer)
    warn(f"{folder} holds LoRA adapters, which were added to the weights of {name}")
    return merged


def known_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise LyapunovPruneError(f"unknown dtype {name}{did_you_mean(name, _DTYPES)}; give one of {', '.join(_DTYPES)}")
    return getattr(torch, name)


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
