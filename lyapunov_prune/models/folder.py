"""Checks on a checkpoint folder before transformers reads it: a complete decoder, using only files in the folder.

transformers trusts what it finds: it unpickles a file that an index names, follows paths out of the folder, fetches the
attention kernel that a config asks for, and falls back to defaults for a broken `generation_config.json`.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from lyapunov_prune.arguments import Range, fits
from lyapunov_prune.errors import LyapunovPruneError, first_line, first_of, reason_of, reported
from lyapunov_prune.models.compact import MODULE, PREFIX, family_of, register
from lyapunov_prune.models.quantised import quantisation, reader_of
from lyapunov_prune.models.reader import UNPACK
from lyapunov_prune.models.structure import LAYER_COUNTS, is_encoder
from lyapunov_prune.models.weight_files import headers, require_indexed, require_plain, weight_files
from lyapunov_prune.results.files import parsed, require_file

ADAPTER_CONFIG = "adapter_config.json"
_GENERATION = "generation_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Implementations in torch itself. Any other name is fetched, from a package or as a repository's code.
_BUILT_IN = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
_MOST_LAYERS = 10**4  # they are built before any weight is looked for
# What parsers raise on files that are cut or damaged; other errors are of what whole files say.
_BROKEN = (json.JSONDecodeError, UnicodeDecodeError, SafetensorError, EOFError, struct.error)
_CHOICES = ("attn_implementation", "experts_implementation")


def require_loadable(
    folder: Path,
    *,
    quantised: Callable[[PreTrainedConfig], object] = lambda config: None,
) -> PreTrainedConfig:
    """Return the config in `folder` if it holds a decoder with complete safetensors weights of its own.

    `quantised(config)` says whether the caller accepts a quantised checkpoint. The weight files are those that
    transformers would choose; only their headers and sizes are read. Raises LyapunovPruneError otherwise.
    """
    for path in folder.iterdir():
        require_file(path)
    require_no_adapter_config(folder)
    config = read_config(folder)
    # For some models, transformers continues with the inner text config.
    named, inner = (getattr(c, "transformers_weights", None) for c in (config, config.get_text_config(decoder=True)))
    chosen = next((choice for choice in _chosen(vars(config)) if choice not in _BUILT_IN), "")
    method = quantisation(config)
    why = ""
    if method and not quantised(config):
        why = f"has weights that are {method}; {UNPACK}"
    elif other := _no_decoder(config):
        why = other
    elif chosen:
        why = (
            f"asks for {chosen} as attention or experts, and only what is built into torch is run "
            f"({', '.join(_BUILT_IN)}); remove that line from config.json"
        )
    elif named != inner:
        why = f"names the weights {named} and {inner}; name one of them"
    if why:
        raise LyapunovPruneError(f"{folder} {why}")
    _require_safetensors(folder, named)
    reader = reader_of(config)
    if reader is not None or not method:
        require_plain(headers(weight_files(folder, named)), reader)
    if os.path.lexists(folder / _GENERATION):
        with loading_errors(folder / _GENERATION):
            if not isinstance(json.loads((folder / _GENERATION).read_text(encoding="utf-8")), dict):
                raise ValueError("it is no JSON object")
    return config


def require_no_adapter_config(folder: Path) -> None:
    """Raise LyapunovPruneError for adapters: transformers would attach them to whatever base model they name."""
    if (folder / ADAPTER_CONFIG).is_file():
        with loading_errors(folder):
            base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        raise LyapunovPruneError(
            f"{folder} holds adapters for {base}; merge them into it in memory, by lyapunov-prune export"
        )


def _chosen(value: Any, chosen: bool = False) -> Iterator[str]:
    """The implementations that a config names, including nested configs."""
    if isinstance(value, PreTrainedConfig):
        value = vars(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _chosen(inner, chosen or any(choice in str(key) for choice in _CHOICES))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _chosen(inner, chosen)
    elif chosen and isinstance(value, str):
        yield value


def read_config(folder: Path) -> PreTrainedConfig:
    """The config in `folder`; raises LyapunovPruneError if there is none or it is invalid."""
    require_module(folder)
    with loading_errors(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    named = config.architectures
    text = config.get_text_config(decoder=True)
    parts = [config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))]
    layers = [n for part in parts for name in LAYER_COUNTS if isinstance(n := getattr(part, name, None), int)]
    window = getattr(text, "sliding_window", None)
    wrong = {
        "architectures that are not a list of names": not fits(named, Sequence[str] | None),
        f"{max(layers, default=0)} layers, which is too many": max(layers, default=0) > _MOST_LAYERS,
        "a sliding_window that is not a number of tokens": not fits(
            window, Annotated[int, Range(0, 2**31, below=True)] | None
        ),
    }
    if what := first_of(wrong):
        raise LyapunovPruneError(f"the config in {folder} has {what}; correct it there")
    return config


def _no_decoder(config: PreTrainedConfig) -> str | None:
    """Why the config is not that of a decoder, as words after the name of its folder; None if it is."""
    architectures = ", ".join(config.architectures or ()) or config.model_type
    if config.is_encoder_decoder:
        return f"is an encoder-decoder ({architectures}); give a decoder"
    if config.architectures and is_encoder(config, getattr(transformers, config.architectures[0], None)):
        return f"is an encoder ({architectures}), which reads text in both directions; give a decoder"
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys()
    return None if family_of(config) in known else f"is not a causal language model ({architectures}); give a decoder"


def require_module(folder: Path) -> None:
    """Register the classes of a compact checkpoint with transformers: this package's own copy, never the folder's.

    Raises LyapunovPruneError if there is no config, and if a compact checkpoint lacks its module, without which only
    this package could load it.
    """
    model_type: Any = ""
    with suppress(OSError, ValueError, AttributeError):  # if the file is broken, transformers reports how
        model_type = parsed((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    compact = isinstance(model_type, str) and model_type.startswith(PREFIX)
    lacks = {
        "config.json; give the folder of a transformers checkpoint": not (folder / "config.json").is_file(),
        f"{MODULE}, the module of a compact checkpoint; fetch it again": compact and not (folder / MODULE).is_file(),
    }
    if what := first_of(lacks):
        raise LyapunovPruneError(f"{folder} has no {what}")
    if compact:
        register(model_type.removeprefix(PREFIX))


def _require_safetensors(folder: Path, named: str | None) -> None:
    files = weight_files(folder, named)
    if not files:
        pickles = [p.name for pattern in _PICKLES for p in folder.glob(pattern)]
        what = "no safetensors weights; give a complete checkpoint"
        if pickles:
            what = f"only pickled weights ({pickles[0]}), which can run code; convert them to safetensors first"
        raise LyapunovPruneError(f"{folder} holds {what}")
    for file in files:
        what = f"{file} is truncated or corrupt"
        remedy = f"lyapunov-prune check {folder} lists what is wrong"
        with reported(what, remedy, SafetensorError, OSError), safe_open(file, framework="pt"):
            pass  # opening reads the header and compares it with the file's size
    require_indexed(folder, named)


@contextmanager
def loading_errors(where: Path | str) -> Iterator[None]:
    """Turn any exception while reading foreign files into one line about `where`."""
    try:
        yield
    except (LyapunovPruneError, torch.OutOfMemoryError):  # already one line
        raise
    except Exception as error:  # transformers and gguf raise whatever their parsers run into
        raise LyapunovPruneError(_diagnosis(where, error)) from error


def _diagnosis(where: Path | str, error: Exception) -> str:
    unknown = re.search("model type `(.*?)` but Transformers does not recognize", str(error))
    version = f"transformers {transformers.__version__}"
    if "trust_remote_code" in str(error):
        return f"{where} needs its own Python code, which is never run; give a model that transformers knows"
    if unknown:
        return f"{where} is a {unknown[1]}, which {version} does not know; upgrade transformers, or give another model"
    if isinstance(error, StrictDataclassError):
        return (
            f"{where} has a setting that {version} does not accept: {first_line(error)}; correct it there, or give "
            "another model"
        )
    if "automatic conversion of the weights" in str(error):  # the rest of it points to a report that is not shown
        return f"{where} holds weights that {version} cannot convert as its config.json asks; give the original weights"
    if isinstance(error, _BROKEN) or "not a valid JSON" in str(error):
        return f"cannot load {where}, it may be truncated or corrupt: {first_line(error)}; fetch it again"
    return f"cannot load {where}: {reason_of(error)}; correct its config.json, or give another model"
