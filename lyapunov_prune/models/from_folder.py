"""Load a model and its tokenizer from a folder, complete or not at all."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lyapunov_prune.errors import LyapunovPruneError, first_line
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.dispatched import SPREAD, over_gpus
from lyapunov_prune.models.folder import loading_errors, require_loadable
from lyapunov_prune.models.left_out import find_left_out, keep_left_out
from lyapunov_prune.models.quantised import (
    is_loadable,
    is_packed,
    quantisation,
    reader_of,
    remedy,
    require_kernels,
    unpacking,
)
from lyapunov_prune.models.settings import unknown_layer_numbers, unknown_settings
from lyapunov_prune.models.structure import Structure, find_layers, find_structure
from lyapunov_prune.models.tokenizers import require_bounded, require_bounded_file
from lyapunov_prune.models.weight_files import headers, numbers_held, targets_of, weight_files
from lyapunov_prune.models.wrappers import auto_class
from lyapunov_prune.progress import warn
from lyapunov_prune.results.history import keep_history, read_history

LOCAL = {"local_files_only": True, "trust_remote_code": False}  # None would prompt, and run code on "y"
# Settings that would add outputs to every forward; measurements read outputs by name and need none of these.
_PLAIN_OUTPUT = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
# Every tokenizer has one of these files, unless its vocabulary is code.
_TOKENIZER = ("token*", "vocab*", "*.model", "tekken.json", "*.tiktoken")
_SETTINGS = "tokenizer_config.json"
_SPARE = 2**26  # numbers beyond those in the files that a model may have, such as tables of positions


def load_folder(folder: Path, options: dict[str, Any], *, text_only: bool = False) -> Decoder:
    """Load the checkpoint in `folder` with its history, by transformers' `options` (`dtype`, `device_map`).

    A decoder inside a multimodal model is loaded with the whole model, or alone with `text_only` (`auto_class`).

    Packed weights that a reader reads are unpacked (`reader_of`); others stay packed, and are refused on the
    `meta` device. Raises LyapunovPruneError for anything that cannot be loaded whole.
    """
    with quiet():  # faults of the config are reported in one line
        quantised = reader_of if options["device_map"] == "meta" else is_loadable
        config = require_loadable(folder, quantised=quantised)
    packed, reader = quantisation(config), reader_of(config)
    held = headers(weight_files(folder, getattr(config, "transformers_weights", None)))
    if reader is not None:
        with loading_errors(folder):
            reader.require({name: header.shape for name, header in held.items()})
    elif packed:
        try:
            with quiet():
                require_kernels(config, options["device_map"])
        except Exception as error:  # each method reports differently what it lacks
            raise LyapunovPruneError(
                f"the weights in {folder} are {packed}, and cannot be read here ({first_line(error)}); "
                f"{remedy(config, error)}"
            ) from None
    with unpacking(reader):
        auto = auto_class(config, text_only=text_only)
        wanted = "a causal decoder" if auto is AutoModelForCausalLM else "the text model alone (export --text-only)"
        if text_only:
            wanted = "the whole model (leave out text_only)"
        require_held(auto, config, numbers_held(held), folder)
        loaded = load_whole(folder, folder, {}, options | {"use_safetensors": True}, auto, wanted)
    if reader is not None:  # transformers drops it, but it marks models whose weights must not be changed
        loaded.model.config.quantization_config = config.quantization_config
    tell_left_out(loaded.model, loaded.structure, folder, held, asked=text_only)
    keep_history(loaded.model, read_history(folder))
    return loaded


def load_whole(
    where: Path,
    folder: Path,
    source: dict[str, Any],
    options: dict[str, Any],
    auto: Any = AutoModelForCausalLM,
    wanted: str = "a causal decoder",
) -> Decoder:
    """Model and tokenizer; refused if any weight would have to be initialised. `wanted` names the remedy."""
    model = load_weights(auto, where, folder, source | LOCAL | options, wanted)
    return Decoder(model.eval(), find_structure(model), _load_tokenizer(where, folder, source))


def require_held(auto: Any, config: PreTrainedConfig, held: int, where: Path) -> None:
    """Raise LyapunovPruneError if the config makes far more numbers than the `held` ones in the files of `where`.

    transformers would allocate them before it tells that they are missing. What differs by less is told by loading.
    """
    with loading_errors(where), quiet(), torch.device("meta"):
        made: Any = auto.from_config(config)
    tensors = [*made.parameters(), *made.buffers()]
    if sum(tensor.numel() for tensor in tensors) > 2 * held + _SPARE:
        largest = " × ".join(map(str, max(tensors, key=torch.Tensor.numel).shape))
        raise LyapunovPruneError(
            f"the config of {where} makes a model with a tensor of {largest}, and the files hold {held:,} numbers; "
            f"lyapunov-prune check {where} lists what is wrong"
        )


def load_bare(folder: Path) -> Decoder:
    """The model described by the config in `folder`, on the `meta` device, as if its weights were not quantised.

    Tensors in the files are not checked, because quantised matrices have names and shapes of their own. Raises
    LyapunovPruneError if the folder does not hold a complete decoder checkpoint.
    """
    with quiet():
        config = require_loadable(folder, quantised=lambda config: True)
    with loading_errors(folder), quiet(), torch.device("meta"):
        model: Any = auto_class(config).from_config(config)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    _tell_of_code(model, folder)
    keep_history(model, read_history(folder))
    return Decoder(model.eval(), find_structure(model), _load_tokenizer(folder, folder, {}))


def _load_tokenizer(where: Path, folder: Path, source: dict[str, Any]) -> PreTrainedTokenizerBase:
    with _uncollected():
        require_bounded_file(folder / "tokenizer.json")
        try:
            with loading_errors(f"the tokenizer of {where}"), quiet():
                tokenizer = AutoTokenizer.from_pretrained(folder, **source | LOCAL)
        except LyapunovPruneError:
            found = {path.name for name in _TOKENIZER for path in folder.glob(name)}
            if where == folder and not found - {_SETTINGS}:
                raise LyapunovPruneError(f"{where} holds no tokenizer; copy the model's own into it") from None
            raise
    require_bounded(tokenizer, where)
    return tokenizer


def load_weights(auto: Any, where: Path, folder: Path, options: dict[str, Any], wanted: str) -> PreTrainedModel:
    """The model in `folder`, loaded by transformers' `auto` class; refused if a weight would have to be initialised."""
    if options["device_map"] == SPREAD:
        with loading_errors(where), quiet():
            bare = auto.from_pretrained(folder, **_PLAIN_OUTPUT, **options | {"device_map": "meta"})
        options = options | {"device_map": over_gpus(bare)}
    plain = {} if "config" in options else _PLAIN_OUTPUT  # beside a config, these would reach the model's constructor
    with loading_errors(where), quiet():
        loaded: Any = auto.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **plain, **options
        )
    model, info = loaded
    if model.dtype == torch.float64:  # the grouped kernel for fused experts lacks it
        model.set_experts_implementation("eager")
    broken = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    why = ""
    if broken:
        why = f"lacks {len(broken)} weights of a {type(model).__name__} or has them in another shape ({broken[0]})"
        if info["unexpected_keys"]:  # perhaps under a name of another program
            why += f", and holds {min(info['unexpected_keys'])}, which is none of them"
    elif is_compact(model) and info["unexpected_keys"]:  # the config is wrong about what was removed
        why = f"holds {sorted(info['unexpected_keys'])[0]}, which its config cuts out"
    if why:
        raise LyapunovPruneError(
            f"{where} {why}; lyapunov-prune check {where} lists what is wrong; give a complete checkpoint, or {wanted}"
        )
    _tell_of_code(model, where)
    return model


def tell_left_out(
    model: PreTrainedModel, structure: Structure, folder: Path, held: Iterable[str], *, asked: bool = False
) -> None:
    """Report the tensors in `folder`, named `held`, that `model` does not hold, and store them on it.

    Nothing is reported for packed weights, whose kernels need further tables.
    """
    if is_packed(model):
        return
    targets, others = targets_of(model, held)
    taken = {key: target.name for key, target in targets.items()}
    keep_left_out(model, find_left_out(model, structure, taken, others, asked=asked), folder)


def _tell_of_code(model: PreTrainedModel, where: Path) -> None:
    """Warn of code named in the config, which is not run, and of its settings; removes the reference to the code."""
    if is_compact(model):  # its code is part of this package
        return
    config = model.config.get_text_config(decoder=True)
    unknown = list(unknown_settings(config))
    numbers = unknown_layer_numbers(config, find_layers(model).num_layers)
    code = vars(model.config).pop("auto_map", None)
    if not code and not numbers:
        return
    files = sorted({str(name).partition(".")[0] for name in code.values()}) if isinstance(code, dict) else []
    told = [f"names code of its own ({', '.join(files)}), which is never run"] if code else []
    told += [f"holds settings that transformers does not know ({', '.join(unknown)})"] if unknown else []
    layers = f"; {', '.join(numbers)}: numbers of layers that go unused" if numbers else ""
    warn(
        f"the config in {where} {' and '.join(told)}{layers}. All numbers are those of the plain {type(model).__name__}"
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection, which takes a third of the time of loading half a million merges."""
    looked_for = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked_for:
            gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and notices of transformers; this package reports on stderr itself."""
    notices = logging.getLogger("transformers")
    kept = notices.handlers, notices.propagate
    # A change of the level would clear the caches of thousands of loggers.
    notices.handlers, notices.propagate = [logging.NullHandler()], False
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        # transformers' GGUF reader ignores the switch for its bar
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        notices.handlers, notices.propagate = kept
        if bars:
            transformers.logging.enable_progress_bar()
