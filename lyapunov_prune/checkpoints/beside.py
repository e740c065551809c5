"""The files of a checkpoint besides its weights: config, tokenizer, and others from the folder it was loaded from.

`save_pretrained` writes the config and the tokenizer. Other files beside the weights (a processor's settings, a
tokenizer's own model, the pooling of an embedding model, the licence) are copied, or named in one line on stderr.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.errors import LyapunovPruneError, printable
from lyapunov_prune.models.adapters import base_of, holds_adapters
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.left_out import require_whole, without_heads
from lyapunov_prune.models.loading import checkpoint_folder
from lyapunov_prune.models.weight_files import INDEX, weight_files
from lyapunov_prune.progress import warn
from lyapunov_prune.results.files import parsed

MODULES = "modules.json"  # the parts of a sentence-transformers model, each in its own folder
_TOKENIZER = (
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
_SETTINGS = (
    "*preprocessor_config.json",
    "processor_config.json",
    "chat_template*",
    MODULES,
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
)
_IN_PARTS = ("*.json", "*.safetensors", "*.txt")
# Never copied: the source's card and its pictures, and files that are written anew.
_ITS_OWN = ("config.json", "generation_config.json", "*.md", "*.html", "*.png", "*.jpg", "*.svg", ".*", INDEX)
_NAMED = 5  # the most files that the line names


def save_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """`save_pretrained` of both into `folder`, and a copy of the other files of the checkpoint that `model` came from.

    `state` replaces the model's own tensors; if it is empty, no weights are written. The written config counts no
    prediction heads, since no model holds them (`models.left_out`). Raises LyapunovPruneError if a part of the
    checkpoint was left out on loading without being asked.
    """
    require_whole(model)
    bare = state is not None and not state  # before saving, which empties it
    with quiet():
        model.save_pretrained(folder, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    written = json.loads(config.read_text(encoding="utf-8"))
    if written != (right := without_heads(written)):
        config.write_text(json.dumps(right, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if bare:
        for empty in folder.glob("*.safetensors"):
            empty.unlink()
    _carry(model, tokenizer, folder)


def _carry(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    source = source_folder(model)
    if source is None:
        return
    known: tuple[str, ...] = _SETTINGS
    if tokenizer is not None and Path(tokenizer.name_or_path).resolve() == source.resolve():
        known += _TOKENIZER
    behind = []
    for path, patterns in _beside(source, known, getattr(model.config, "transformers_weights", None)):
        name = path.relative_to(source)
        if (folder / name).exists():
            continue
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns) and _inside(path, source):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        else:
            behind.append(printable(str(name)))
    if behind:
        more = f" and {len(behind) - _NAMED} more" if len(behind) > _NAMED else ""
        warn(f"left behind in {source}, as no known part of a checkpoint: {', '.join(behind[:_NAMED])}{more}")


def source_folder(model: PreTrainedModel) -> Path | None:
    """The folder that `model` was loaded from; None if it is unknown or not on this machine."""
    with suppress(LyapunovPruneError):
        folder = checkpoint_folder(model.config._name_or_path, offline=True)
        return checkpoint_folder(base_of(folder), offline=True) if holds_adapters(folder) else folder
    return None


def _beside(source: Path, known: Sequence[str], named: str | None) -> Iterator[tuple[Path, Sequence[str]]]:
    """The paths in `source` besides weights and config, each with the name patterns that are copied there."""
    weights, parts = {path.name for path in weight_files(source, named)}, _parts(source)
    for path in sorted(source.iterdir()):
        if path.name in parts:
            yield from ((inner, _IN_PARTS) for inner in sorted(path.iterdir()))
        elif path.name not in weights and not any(fnmatch(path.name, p) for p in _ITS_OWN) and not _is_result(path):
            yield path, known


def _parts(source: Path) -> set[str]:
    """The folders that hold parts of a sentence-transformers model."""
    try:
        modules: Any = parsed((source / MODULES).read_text(encoding="utf-8"))
        names = {str(module["path"]) for module in modules}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {path.name for path in source.iterdir() if path.is_dir() and path.name in names}


def _inside(path: Path, source: Path) -> bool:
    """Whether a link stays inside `source`, or leads to the blobs beside it as in the hub's cache."""
    home = source.resolve()
    return any(path.resolve().is_relative_to(place) for place in (home, home.parent.parent / "blobs"))


def _is_result(path: Path) -> bool:
    """Whether `path` is a result of this program, which describes the source rather than a model made from it."""
    with suppress(OSError, ValueError, TypeError):
        return path.suffix == ".json" and "kind" in parsed(path.read_text(encoding="utf-8"))
    return False
